"""Continuous batching: who shares a pass, who leaves it, and that nobody notices."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import (
    EXACT,
    ask,
    assert_exact,
    changed,
    collect,
    distributions,
    halves,
    make_engine,
    plain_with,
    run,
    tokens_of,
)

from rlsdk.interfaces import FinishReason, WeightSyncError


@contextmanager
def passes(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """Records every pass through the model: its kind, and its rows (prompts of a prefill)."""
    seen: list[tuple[str, int]] = []
    memory = engine.decoder.memory
    prefill, step = memory.prefill, memory.step
    memory.prefill = lambda prompts: seen.append(("prefill", len(prompts))) or prefill(prompts)
    memory.step = lambda tokens, positions, most: (
        seen.append(("step", len(tokens))) or step(tokens, positions, most=most)
    )
    yield seen
    del memory.prefill, memory.step


def test_a_prompt_is_run_once_however_many_samples_it_has(served: Any) -> None:
    requests = [ask(str(at), [5, 6, at + 9], 20, max_tokens=3, stop_token_ids=()) for at in range(3)]
    with passes(served) as seen:
        outputs = run(served, requests)
    assert len(outputs) == 60
    assert sum(count for kind, count in seen if kind == "prefill") == 3
    assert max(count for kind, count in seen if kind == "step") <= served.spec.max_running


def test_calls_under_way_together_share_the_passes(served: Any) -> None:
    async def three() -> list[Any]:
        calls = [[ask("same name", [5, at + 9], 2, max_tokens=10, stop_token_ids=())] for at in range(3)]
        return await asyncio.gather(*(collect(served, call) for call in calls))

    with passes(served) as seen:
        together = asyncio.run(three())
    alone = [run(served, [ask("same name", [5, at + 9], 2, max_tokens=10, stop_token_ids=())]) for at in range(3)]
    assert [tokens_of(outputs) for outputs in together] == [tokens_of(outputs) for outputs in alone]
    assert sum(kind == "step" for kind, _ in seen) <= 12  # not 27
    assert max(count for kind, count in seen if kind == "step") == 6


def test_finished_rows_leave_the_batch(served: Any) -> None:
    requests = [
        ask(str(at), [5, 6, 7], max_tokens=limit, stop_token_ids=()) for at, limit in enumerate([2, 2, 2, 2, 40])
    ]
    with passes(served) as seen:
        run(served, requests)
    steps = [count for kind, count in seen if kind == "step"]
    assert steps[0] == 5
    assert steps[-1] == 1
    assert sum(steps) < 50


def test_prompts_of_very_different_length_are_not_padded_to_each_other(qwen2: Path) -> None:
    engine = make_engine(qwen2, max_model_tokens=500, max_running=64)
    lengths = [8] * 30 + [400] * 3
    with passes(engine) as seen:
        run(engine, [ask(str(at), [5] * length, max_tokens=1) for at, length in enumerate(lengths)])
    assert [count for kind, count in seen if kind == "prefill"] == [30, 3]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 14)), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_the_number_of_rows_at_once_changes_nothing(
    served: Any, qwen2: Path, asked: list[tuple[int, int, int]], max_running: int
) -> None:
    requests = [
        ask(str(at), [(5 + at + i) % 100 + 5 for i in range(length)], n, max_tokens=limit, seed=at)
        for at, (length, n, limit) in enumerate(asked)
    ]
    served.decoder.max_running, before = max_running, served.decoder.max_running
    try:
        few = run(served, requests)
        served.decoder.max_running = 100
        many = run(served, requests)
    finally:
        served.decoder.max_running = before
    assert tokens_of(few) == tokens_of(many)
    logs = {(o.request_id, o.sample_index): o.log_probs for o in many}
    for output in few:
        assert np.allclose(output.log_probs, logs[output.request_id, output.sample_index], atol=EXACT, rtol=1e-5)


def test_nothing_is_kept_when_nobody_asks(served: Any) -> None:
    run(served, [ask("x", [5, 6], 9)])
    assert not served.decoder.jobs
    assert served.decoder.memory.keys == []
    assert served.decoder.prefilled is None
    assert served.decoder.running.tokens.numel() == 0


def test_a_caller_who_leaves_takes_his_samples_along(served: Any) -> None:
    async def leave() -> None:
        stream = served.generate([ask("x", [5], max_tokens=1), ask("y", [6], 9, max_tokens=50, stop_token_ids=())])
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert not served.decoder.jobs


def test_an_error_in_a_pass_ends_every_call_and_the_engine_goes_on(served: Any) -> None:
    def burst(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    async def two() -> list[Any]:
        calls = (collect(served, [ask(name, [5], 3, max_tokens=20, stop_token_ids=())]) for name in "ab")
        return await asyncio.gather(*calls, return_exceptions=True)

    served.decoder.memory.step = burst
    try:
        assert [type(error) for error in asyncio.run(two())] == [MemoryError, MemoryError]
    finally:
        del served.decoder.memory.step
    assert len(run(served, [ask("c", [5], 3)])) == 3


def test_abort_of_one_request_leaves_the_others(served: Any, plain: Any) -> None:
    requests = [ask(name, [5, 6, at + 9], 6, max_tokens=30, stop_token_ids=()) for at, name in enumerate("abc")]
    whole = tokens_of(run(served, requests))

    async def abort_on_the_way() -> list[Any]:
        task = asyncio.create_task(collect(served, requests))
        for _ in range(8):
            await asyncio.sleep(0)
        served.abort(["b", "nobody"])
        return await task

    outputs = asyncio.run(abort_on_the_way())
    assert len(outputs) == 18
    for output in outputs:
        tokens = output.token_ids.tolist()
        aborted = output.finish_reason is FinishReason.ABORT
        assert aborted == (output.request_id == "b")
        assert len(output.log_probs) == len(tokens)
        assert whole[output.request_id, output.sample_index][: len(tokens)] == tokens
        assert aborted or len(tokens) == 30
        if tokens:
            assert_exact(plain, requests["abc".index(output.request_id)].prompt_ids, output)
    begun = [len(o.token_ids) for o in outputs if o.request_id == "b"]
    assert max(begun) < 30


def from_another_thread(work: Callable[[], object]) -> None:
    """Runs `work` there and waits until it has returned."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("at", [1, 2, 7])
def test_abort_from_another_thread_ends_everything_and_waits_for_no_step(
    served: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    requests = [ask(str(name), [5, 6, name + 4], 5, max_tokens=55, stop_token_ids=()) for name in range(8)]
    step, steps = served.decoder.step, itertools.count(1)

    def stepping(*args: Any) -> Any:
        if next(steps) == at:
            from_another_thread(served.abort)
        return step(*args)

    monkeypatch.setattr(served.decoder, "step", stepping)
    outputs = run(served, requests)
    assert len(outputs) == 40
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert all(len(o.token_ids) == len(o.log_probs) < 55 for o in outputs)
    assert len(run(served, [ask("0", [5], 3)])) == 3


def test_an_abort_that_comes_while_a_call_is_taken_in_ends_all_of_the_call(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = served.decoder.submit

    def submitting(jobs: Sequence[Any]) -> None:
        class Watched(list[Any]):
            def __iter__(self) -> Iterator[Any]:
                for at, job in enumerate(list.__iter__(self)):
                    if at == 3:
                        from_another_thread(served.abort)
                    yield job

        submit(Watched(jobs))

    monkeypatch.setattr(served.decoder, "submit", submitting)
    outputs = run(served, [ask(str(name), [5, name], 4) for name in range(5)])
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [(FinishReason.ABORT, 0)] * 20
    assert all(o.finish_reason is not FinishReason.ABORT for o in run(served, [ask("0", [5], 3)]))


def test_aborts_from_another_thread_lose_no_sample(served: Any) -> None:
    """Calls and aborts as they come: every sample is given out once, and the engine goes on."""
    done = threading.Event()

    def abort_again_and_again() -> None:
        while not done.wait(0.0003):
            served.abort()
            served.abort(["1"])

    thread = threading.Thread(target=abort_again_and_again)
    thread.start()
    try:
        for _ in range(60):
            outputs = run(served, [ask(str(name), [5, name], 3, max_tokens=4) for name in range(4)])
            assert len(tokens_of(outputs)) == 12
    finally:
        done.set()
        thread.join(60)
    assert not served.decoder.jobs
    assert all(o.finish_reason is not FinishReason.ABORT for o in run(served, [ask("0", [5], 3)]))


def test_an_abort_that_hits_nobody_does_not_hit_those_who_come_later(served: Any) -> None:
    served.abort()
    served.abort(["x"])
    assert all(o.finish_reason is not FinishReason.ABORT for o in run(served, [ask("x", [5], 3)]))


async def paused_midway(engine: Any, requests: list[Any]) -> asyncio.Task[list[Any]]:
    """A call that was paused after a few tokens."""
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(9):
        await asyncio.sleep(0)
    engine.pause()
    await asyncio.sleep(0.03)
    return task


def test_a_pause_loses_nothing(served: Any) -> None:
    requests = [ask(str(at), [5, at + 9], 4, max_tokens=20, stop_token_ids=()) for at in range(3)]

    async def with_pause() -> list[Any]:
        task = await paused_midway(served, requests)
        made = served.decoder.running.table["made"].copy()
        await asyncio.sleep(0.03)
        assert (served.decoder.running.table["made"] == made).all()
        served.resume()
        return await task

    assert tokens_of(asyncio.run(with_pause())) == tokens_of(run(served, requests))


@pytest.mark.parametrize("version", [3, 0])  # 0 is the name that the weights before have, too
def test_after_a_pause_tokens_are_those_of_the_new_weights_and_nothing_old_is_read(
    qwen2: Path, plain: Any, version: int
) -> None:
    engine = make_engine(qwen2)
    # Of different lengths, more samples than rows: some have run, some wait behind a prompt that was run, some wait.
    requests = [ask(str(at), range(5, 8 + 5 * at), 4, max_tokens=20, stop_token_ids=()) for at in range(4)]
    state = changed(engine, 5)

    async def with_update() -> list[Any]:
        task = await paused_midway(engine, requests)
        assert not task.done()
        engine.update_weights(iter(halves(state)), version)
        engine.resume()
        return await task

    outputs = asyncio.run(with_update())
    new = plain_with(qwen2, state)
    assert len(outputs) == 16
    spans = set()
    for output in outputs:
        prompt, tokens = requests[int(output.request_id)].prompt_ids, output.token_ids.tolist()
        old_logs, new_logs = (distributions(model, prompt, tokens)[range(20), tokens] for model in (plain, new))
        found = torch.from_numpy(output.log_probs)
        is_new = ((found - new_logs).abs() < (found - old_logs).abs()).int()
        assert (is_new.diff() >= 0).all()
        assert torch.allclose(found, torch.where(is_new.bool(), new_logs, old_logs), atol=EXACT, rtol=1e-5)
        runs = [(run.version, run.num_tokens) for run in output.versions]
        num_new = int(is_new.sum())
        if num_new == 20 or version == 0:
            assert runs == [(version, 20)]
        else:
            assert runs == [(0, 20 - num_new), (version, num_new)]
        spans.add(int(is_new.sum()))
    assert 20 in spans
    assert min(spans) < 20


def test_rows_of_very_different_length_are_computed_again_without_padding_to_each_other(qwen2: Path) -> None:
    """Long rows were there first; each reads its own keys and values afterwards."""
    engine = make_engine(qwen2, max_model_tokens=500, max_running=64)
    state = changed(engine, 5)
    requests = [ask(str(at), [5] * (400 if at < 3 else 8), max_tokens=20, stop_token_ids=()) for at in range(33)]

    async def with_update() -> tuple[list[Any], list[int]]:
        long = await paused_midway(engine, requests[:3])
        engine.resume()
        short = asyncio.create_task(collect(engine, requests[3:]))
        while engine.decoder.running.num_alive < 33:
            await asyncio.sleep(0)
        engine.pause()
        engine.update_weights(iter(halves(state)), 1)
        engine.resume()
        with passes(engine) as seen:
            outputs = [*await long, *await short]
        return outputs, [count for kind, count in seen if kind == "prefill"]

    outputs, prefills = asyncio.run(with_update())
    assert prefills == [30, 3]
    new = plain_with(qwen2, state)
    for output in outputs:
        old = output.versions[0].num_tokens
        prompt, tokens = requests[int(output.request_id)].prompt_ids, output.token_ids.tolist()
        expected = distributions(new, prompt, tokens)[range(20), tokens][old:]
        assert torch.allclose(torch.from_numpy(output.log_probs)[old:], expected, atol=EXACT, rtol=1e-5)


def test_a_pause_with_a_failed_update_refuses_until_a_whole_one_came(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    requests = [ask("x", [5, 6], 3, max_tokens=20, stop_token_ids=())]
    pieces = halves(changed(engine))

    async def with_updates(whole: bool) -> list[Any]:
        task = await paused_midway(engine, requests)
        with pytest.raises(WeightSyncError, match="not covered"):
            engine.update_weights(iter(pieces[1:]), 5)
        with pytest.raises(WeightSyncError, match="version 5 failed halfway"):
            engine.resume()
        if whole:
            engine.update_weights(iter(pieces), 6)
            engine.resume()
        else:
            engine.abort()
        return await task

    for output in asyncio.run(with_updates(True)):
        assert [run.version for run in output.versions] == [0, 6]
    aborted = asyncio.run(with_updates(False))
    # What was sampled before the update is whole, and is given out.
    assert {o.finish_reason for o in aborted} == {FinishReason.ABORT}
    assert {len(o.token_ids) > 0 for o in aborted} == {True}
    assert {run.version for o in aborted for run in o.versions} == {6}
    assert not engine.decoder.jobs


def test_what_is_paused_can_be_aborted(served: Any) -> None:
    async def with_abort() -> list[Any]:
        task = await paused_midway(served, [ask("x", [5, 6], 9, max_tokens=50, stop_token_ids=())])
        served.abort()
        try:
            return await asyncio.wait_for(task, 20)
        finally:
            served.resume()

    outputs = asyncio.run(with_abort())
    assert len(outputs) == 9
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert {len(o.token_ids) > 0 for o in outputs} == {True, False}
