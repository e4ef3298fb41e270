"""Abort, pause and resume: nothing is lost, and what is old and what is new is told apart."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from cases import EXACT, adopt, ask, changed, collect, halves, log_probs_of, plain_model, run, state_of, tokens_of

from rlsdk.interfaces import FinishReason, WeightSyncError


async def some_tokens(engine: Any, least: int = 3) -> None:
    """Waits until some sample has a few tokens."""
    while max((len(sample.token_ids) for sample in list(engine.samples.values())), default=0) < least:
        await asyncio.sleep(0.001)


async def paused_midway(engine: Any, requests: list[Any]) -> asyncio.Task[list[Any]]:
    """A call that was paused after a few tokens. SGLang runs on its own: on a busy machine it may have been quicker."""
    for _ in range(10):
        task = asyncio.create_task(collect(engine, requests))
        await some_tokens(engine)
        engine.pause()
        if engine.samples:
            return task
        engine.resume()
        await task
    raise AssertionError("every attempt ended before the pause")


def test_abort_of_one_request_leaves_the_others(served: Any, plain: Any) -> None:
    requests = [ask(name, [5, 6, at + 9], 4, max_tokens=100, stop_token_ids=()) for at, name in enumerate("abc")]
    whole = tokens_of(run(served, requests))

    async def abort_on_the_way() -> list[Any]:
        task = asyncio.create_task(collect(served, requests))
        await some_tokens(served)
        served.abort(["b", "nobody"])
        return await task

    outputs = asyncio.run(abort_on_the_way())
    assert len(outputs) == 12
    for output in outputs:
        tokens = output.token_ids.tolist()
        aborted = output.finish_reason is FinishReason.ABORT
        assert aborted == (output.request_id == "b")
        assert whole[output.request_id, output.sample_index][: len(tokens)] == tokens
        assert len(tokens) < 100 if aborted else len(tokens) == 100
        prompt = requests["abc".index(output.request_id)].prompt_ids
        expected = log_probs_of(plain, prompt, tokens)
        assert torch.allclose(torch.from_numpy(output.log_probs), expected, atol=EXACT, rtol=0)


def test_abort_from_another_thread_ends_everything(served: Any) -> None:
    requests = [ask(str(at), [5, 6, at + 4], 5, max_tokens=110, stop_token_ids=()) for at in range(8)]
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(run(served, requests)))
    thread.start()
    while not served.samples:
        time.sleep(0.001)
    served.abort()
    thread.join(60)
    assert not thread.is_alive()
    assert len(outputs) == 40
    assert all(o.finish_reason is FinishReason.ABORT and len(o.token_ids) == len(o.log_probs) < 110 for o in outputs)
    assert len(run(served, [ask("0", [5], 3)])) == 3


def test_an_abort_that_hits_nobody_does_not_hit_those_who_come_later(served: Any) -> None:
    served.abort()
    served.abort(["x"])
    assert all(o.finish_reason is not FinishReason.ABORT for o in run(served, [ask("x", [5], 3)]))


def test_a_caller_who_leaves_takes_his_samples_along(served: Any) -> None:
    async def leave() -> None:
        stream = served.generate([ask("x", [5], 3, max_tokens=9), ask("y", [5], 3, max_tokens=90, stop_token_ids=())])
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert not served.samples
    assert len(run(served, [ask("x", [5], 3)])) == 3


def test_a_pause_loses_nothing(served: Any) -> None:
    requests = [ask(str(at), [5, at + 9], 4, max_tokens=100, stop_token_ids=()) for at in range(3)]

    async def with_pause() -> list[Any]:
        task = await paused_midway(served, requests)
        made = [len(sample.token_ids) for sample in served.samples.values()]
        await asyncio.sleep(0.03)
        assert [len(sample.token_ids) for sample in served.samples.values()] == made
        assert max(made) > 0
        served.resume()
        return await task

    assert tokens_of(asyncio.run(with_pause())) == tokens_of(run(served, requests))


def test_after_a_pause_tokens_are_those_of_the_new_weights_and_nothing_old_is_read(
    served: Any, plain: Any, qwen2: Any
) -> None:
    # More samples than run at once, of different lengths: some have run, some wait.
    requests = [ask(str(at), range(5, 8 + 5 * at), 6, max_tokens=100, stop_token_ids=()) for at in range(4)]
    state = changed(state_of(plain), 5)

    async def with_update() -> list[Any]:
        task = await paused_midway(served, requests)
        assert not task.done()
        served.update_weights(iter(halves(state)), 3)
        served.resume()
        return await task

    outputs = asyncio.run(with_update())
    new = plain_model(qwen2)
    adopt(new, state)
    spans = set()
    assert len(outputs) == 24
    for output in outputs:
        prompt, tokens = requests[int(output.request_id)].prompt_ids, output.token_ids.tolist()
        old_logs, new_logs = (log_probs_of(model, prompt, tokens) for model in (plain, new))
        found = torch.from_numpy(output.log_probs)
        is_new = ((found - new_logs).abs() < (found - old_logs).abs()).int()
        assert (is_new.diff() >= 0).all()
        assert torch.allclose(found, torch.where(is_new.bool(), new_logs, old_logs), atol=EXACT, rtol=0)
        assert (output.policy_version, output.last_policy_version) == (0 if not is_new[0] else 3, 3)
        spans.add(int(is_new.sum()))
    assert 100 in spans
    assert min(spans) < 100


def test_a_pause_with_a_failed_update_refuses_until_a_whole_one_came(served: Any, plain: Any) -> None:
    requests = [ask("x", [5, 6], 3, max_tokens=100, stop_token_ids=())]
    pieces = halves(changed(state_of(plain), 1))

    async def with_updates(whole: bool) -> list[Any]:
        task = await paused_midway(served, requests)
        with pytest.raises(WeightSyncError, match="not covered"):
            served.update_weights(iter(pieces[1:]), 5)
        if whole:
            served.update_weights(iter(pieces), 6)
        served.resume()
        return await task

    assert {o.last_policy_version for o in asyncio.run(with_updates(True))} == {6}
    with pytest.raises(WeightSyncError, match="version 5 failed half-way"):
        asyncio.run(with_updates(False))
    assert not served.samples


def test_what_is_paused_can_be_aborted(served: Any) -> None:
    async def with_abort() -> list[Any]:
        task = await paused_midway(served, [ask("x", [5, 6], 20, max_tokens=100, stop_token_ids=())])
        served.abort()
        return await asyncio.wait_for(task, 20)

    outputs = asyncio.run(with_abort())
    assert len(outputs) == 20
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert {len(o.token_ids) > 0 for o in outputs} == {True, False}
