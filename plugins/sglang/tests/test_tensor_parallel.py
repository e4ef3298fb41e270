"""Two workers, each a process with its part of every matrix: as exact, and as surely updated, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from cases import (
    EXACT,
    adopt,
    ask,
    changed,
    collect,
    halves,
    log_probs_of,
    make_engine,
    plain_model,
    run,
    state_of,
    tokens_of,
    worst,
)

from rlsdk.interfaces import Box, WeightSyncError, fingerprint
from rlsdk_sglang import adapter


@pytest.fixture(scope="module")
def pair(qwen2: Any) -> Iterator[Any]:
    children = set(psutil.Process().children(recursive=True))
    engine = make_engine(qwen2, tp_size=2)
    started = set(psutil.Process().children(recursive=True)) - children
    # Python's own keeper of shared resources stays until this process ends.
    workers = {process for process in started if "resource_tracker" not in " ".join(process.cmdline())}
    assert len(workers) >= 2
    yield engine
    engine.close()
    _, alive = psutil.wait_procs(list(workers), timeout=20)
    assert not alive


def test_two_workers_are_as_exact_as_one_through_ten_updates(
    pair: Any, qwen2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the embedding takes: it goes in several blocks.
    monkeypatch.setattr(adapter, "STAGING_BYTES", 50_000)
    plain = plain_model(qwen2)
    requests = [ask(str(at), range(5, 20 + at), 3, max_tokens=12, seed=at, temperature=0.8) for at in range(3)]
    for version in range(11):
        if version:
            state = changed(state_of(plain), version)
            receipt = pair.update_weights(iter(halves(state)), version)
            assert receipt.fingerprints == {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in state.items()}
            assert receipt.num_bytes == sum(tensor.numel() * 4 for tensor in state.values())
            adopt(plain, state)
        outputs = run(pair, requests)
        assert worst(plain, requests, outputs) < EXACT
        assert {o.policy_version for o in outputs} == {version}
    assert tokens_of(run(pair, requests)) == tokens_of(outputs)


def test_tokens_after_a_pause_are_those_of_the_new_weights(pair: Any, qwen2: Any) -> None:
    old, new = plain_model(qwen2), plain_model(qwen2)
    pair.update_weights(iter(halves(state_of(old))), 20)
    adopt(new, changed(state_of(old), 3))
    request = ask("x", [5, 6, 7], 4, max_tokens=100, stop_token_ids=())

    async def with_update() -> list[Any]:
        task = asyncio.create_task(collect(pair, [request]))
        while not any(len(sample.token_ids) > 2 for sample in list(pair.samples.values())):
            await asyncio.sleep(0.001)
        pair.pause()
        pair.update_weights(iter(halves(state_of(new))), 21)
        pair.resume()
        return await task

    for output in asyncio.run(with_update()):
        assert (output.policy_version, output.last_policy_version) == (20, 21)
        tokens, found = output.token_ids.tolist(), torch.from_numpy(output.log_probs)
        before, after = (log_probs_of(model, [5, 6, 7], tokens) for model in (old, new))
        assert abs(found[0] - before[0]) < EXACT < abs(found[0] - after[0])
        assert abs(found[-1] - after[-1]) < EXACT < abs(found[-1] - before[-1])


def test_a_failed_update_is_mended_by_a_whole_one(pair: Any, qwen2: Any) -> None:
    pieces = halves(state_of(plain_model(qwen2)))
    with pytest.raises(WeightSyncError, match=r"1 of [0-9]+ tensors were not covered"):
        pair.update_weights(iter(pieces[1:]), 30)
    with pytest.raises(WeightSyncError, match="version 30 failed half-way"):
        run(pair, [ask("x", [5])])
    pair.update_weights(iter(pieces), 31)
    assert run(pair, [ask("x", [5])])[0].policy_version == 31
    pair.sleep(2)
    pair.wake(("weights",))
    pair.update_weights(iter(pieces), 32)
    pair.wake(("kv_cache",))
    assert run(pair, [ask("x", [5])])[0].policy_version == 32
