"""Abort, pause and resume from other threads and at every moment: nothing is lost, and old and new are told apart."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlsdk.interfaces import FinishReason, WeightSyncError
from rlsdk.testing.rollout.lab import collect, pieces
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions


def from_another_thread(work: Callable[[], object]) -> None:
    """Runs `work` there and waits until it has returned."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("at", [1, 2, 7])
def test_abort_from_another_thread_ends_everything_and_waits_for_no_step(
    in_process: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    lab, engine = in_process, in_process.engine
    requests = [lab.ask(str(name), [5, 6, name + 4], 5, max_tokens=110) for name in range(8)]
    step, steps = lab.inner.engine.step, itertools.count(1)

    def stepping(*args: Any) -> Any:
        if next(steps) == at:
            from_another_thread(engine.abort)
        return step(*args)

    monkeypatch.setattr(lab.inner.engine, "step", stepping)
    outputs = lab.run(requests)
    assert len(outputs) == 40
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert all(len(o.token_ids) == len(o.log_probs) <= at for o in outputs)
    assert len(lab.run([lab.ask("0", [5], 3)])) == 3


def test_kv_used_grows_with_the_samples_and_is_nothing_without_any(
    in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, step, seen = in_process, in_process.inner.engine.step, []

    def stepping() -> Any:
        found = step()
        seen.append(lab.engine.kv_used())
        return found

    monkeypatch.setattr(lab.inner.engine, "step", stepping)
    lab.run([lab.ask("0", [5, 6, 7], 8, max_tokens=100)])
    assert all(0.0 <= used <= 1.0 for used in seen)
    assert 0.0 < seen[0] < max(seen)
    assert lab.engine.kv_used() == 0.0


def test_an_abort_that_comes_while_a_call_is_taken_in_ends_all_of_the_call(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, added = lab.inner.engine.add, itertools.count(1)

    def adding(sample: Any) -> None:
        if next(added) == 7:
            from_another_thread(lab.engine.abort)
        add(sample)

    monkeypatch.setattr(lab.inner.engine, "add", adding)
    outputs = lab.run([lab.ask(str(name), [5, name], 4) for name in range(5)])
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [(FinishReason.ABORT, 0)] * 20
    assert all(o.finish_reason is not FinishReason.ABORT for o in lab.run([lab.ask("0", [5], 3)]))


def test_aborts_from_another_thread_lose_no_sample(lab: Any) -> None:
    """Calls and aborts as they come: every sample is given out once, and the engine goes on."""
    done = threading.Event()
    engine = lab.engine

    def abort_again_and_again() -> None:
        while not done.wait(0.0003):
            engine.abort()
            engine.abort(["1"])

    thread = threading.Thread(target=abort_again_and_again)
    thread.start()
    try:
        for _ in range(20):
            outputs = lab.run([lab.ask(str(name), [5, name], 3, max_tokens=4) for name in range(4)])
            assert len(tokens_of(outputs)) == 12
    finally:
        done.set()
        thread.join(60)
    assert not lab.inner.samples
    assert all(o.finish_reason is not FinishReason.ABORT for o in lab.run([lab.ask("0", [5], 3)]))


def test_a_caller_who_leaves_takes_his_samples_along(lab: Any) -> None:
    async def leave() -> None:
        stream = lab.engine.generate([lab.ask("x", [5], 3, max_tokens=9), lab.ask("y", [5], 3, max_tokens=90)])
        async for _ in stream:
            break
        await stream.aclose()

    lab.wait(leave())
    assert not lab.inner.samples
    assert len(lab.run([lab.ask("x", [5], 3)])) == 3


def test_what_is_paused_stands_still_and_loses_nothing(lab: Any) -> None:
    requests = [lab.ask(str(at), [5, at + 9], 4, max_tokens=110) for at in range(3)]

    def made() -> list[int]:
        return [len(sample.token_ids) for sample in lab.inner.samples.values()]

    async def with_pause() -> list[Any]:
        task = await lab.paused_midway(requests)
        before: list[int] = []
        while before != made():  # What was made before the pause may still be on its way.
            before = made()
            await asyncio.sleep(0.2)
        assert 0 < max(before) < 110
        lab.engine.resume()
        return await task

    assert tokens_of(lab.wait(with_pause())) == tokens_of(lab.run(requests))


def test_a_call_that_comes_in_a_pause_waits_for_its_end(lab: Any) -> None:
    request = lab.ask("x", [5, 6], 3, max_tokens=4)

    async def while_paused() -> list[Any]:
        lab.engine.pause()
        task = asyncio.create_task(collect(lab.engine, [request]))
        await asyncio.sleep(0.1)
        assert [sample.token_ids for sample in lab.inner.samples.values()] == [[], [], []]
        lab.engine.resume()
        return await task

    assert tokens_of(lab.wait(while_paused())) == tokens_of(lab.run([request]))


def test_after_a_pause_tokens_are_those_of_the_new_weights_and_nothing_old_is_read(lab: Any) -> None:
    # More samples than run at once, of different lengths: some have run, some wait.
    requests = [lab.ask(str(at), range(5, 8 + 5 * at), 6, max_tokens=80) for at in range(4)]
    state = lab.changed(5)

    async def with_update() -> list[Any]:
        task = await lab.paused_midway(requests)
        lab.engine.update_weights(iter(pieces(state)), 3)
        lab.engine.resume()
        return await task

    outputs = lab.wait(with_update())
    faults, mixed = check_mixed_versions(lab, requests, outputs, lab.plain.with_state(state), 3)
    assert not faults
    assert len(outputs) == 24
    assert {o.last_policy_version for o in outputs} == {3}
    assert mixed == sum(o.policy_version == 0 for o in outputs) > 0
    assert any(o.policy_version == 3 for o in outputs)


def test_a_pause_with_a_failed_update_refuses_until_a_whole_one_came(lab: Any) -> None:
    requests = [lab.ask("x", [5, 6], 3, max_tokens=80)]
    shards = pieces(lab.changed(1))

    async def with_updates(whole: bool) -> list[Any]:
        task = await lab.paused_midway(requests)
        with pytest.raises(WeightSyncError, match="not covered"):
            lab.engine.update_weights(iter(shards[1:]), 5)
        with pytest.raises(WeightSyncError, match="version 5 failed halfway"):
            lab.engine.resume()
        if whole:
            lab.engine.update_weights(iter(shards), 6)
            lab.engine.resume()
        else:
            lab.engine.abort()
        return await task

    assert {o.last_policy_version for o in lab.wait(with_updates(True))} == {6}
    assert {o.finish_reason for o in lab.wait(with_updates(False))} == {FinishReason.ABORT}
    assert not lab.inner.samples


def test_what_is_paused_can_be_aborted(lab: Any) -> None:
    async def with_abort() -> list[Any]:
        task = await lab.paused_midway([lab.ask("x", [5, 6], 20, max_tokens=110)])
        lab.engine.abort()
        return await task

    outputs = lab.wait(with_abort())
    assert len(outputs) == 20
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert {len(o.token_ids) > 0 for o in outputs} == {True, False}
