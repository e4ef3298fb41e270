"""Abort, pause and resume: nothing is lost, and what is old and what is new is told apart."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from rlsdk.interfaces import FinishReason, WeightSyncError
from rlsdk.testing.rollout.lab import pieces
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions


def test_abort_from_another_thread_ends_everything(lab: Any) -> None:
    requests = [lab.ask(str(at), [5, 6, at + 4], 5, max_tokens=110) for at in range(8)]
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(lab.run(requests)))
    thread.start()
    while not lab.inner.samples:
        time.sleep(0.001)
    lab.engine.abort()
    thread.join(60)
    assert not thread.is_alive()
    assert len(outputs) == 40
    assert all(o.finish_reason is FinishReason.ABORT and len(o.token_ids) == len(o.log_probs) < 110 for o in outputs)
    assert len(lab.run([lab.ask("0", [5], 3)])) == 3


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
    requests = [lab.ask(str(at), [5, at + 9], 4, max_tokens=100) for at in range(3)]

    def made() -> list[int]:
        return [len(sample.token_ids) for sample in lab.inner.samples.values()]

    async def with_pause() -> list[Any]:
        task = await lab.paused_midway(requests)
        before: list[int] = []
        while before != made():  # What was made before the pause may still be on its way.
            before = made()
            await asyncio.sleep(0.2)
        assert 0 < max(before) < 100
        lab.engine.resume()
        return await task

    assert tokens_of(lab.wait(with_pause())) == tokens_of(lab.run(requests))


def test_after_a_pause_tokens_are_those_of_the_new_weights_and_nothing_old_is_read(lab: Any) -> None:
    # More samples than run at once, of different lengths: some have run, some wait.
    requests = [lab.ask(str(at), range(5, 8 + 5 * at), 6, max_tokens=100) for at in range(4)]
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
    requests = [lab.ask("x", [5, 6], 3, max_tokens=100)]
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
        task = await lab.paused_midway([lab.ask("x", [5, 6], 20, max_tokens=100)])
        lab.engine.abort()
        return await task

    outputs = lab.wait(with_abort())
    assert len(outputs) == 20
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert {len(o.token_ids) > 0 for o in outputs} == {True, False}
