"""Updates: whole or not at all, proven over the memory that serves them, and nothing old is read afterwards."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    EXACT,
    adopt,
    ask,
    changed,
    collect,
    halves,
    make_engine,
    plain_model,
    run,
    state_of,
    tokens_of,
    whole_shards,
    worst,
)

from rlsdk.interfaces import Box, RlsdkError, WeightShard, WeightSyncError, fingerprint
from rlsdk.kit.intake import joined


@pytest.fixture
def other(qwen2: Any) -> Any:
    """A plain model that a test may change."""
    return plain_model(qwen2)


def test_ten_updates_are_each_exact_and_proven(served: Any, other: Any) -> None:
    requests = [ask(str(at), range(5, 20 + at), 4, max_tokens=20, seed=at, temperature=0.8) for at in range(4)]
    assert worst(other, requests, run(served, requests)) < EXACT
    for version in range(1, 11):
        state = changed(state_of(other), version)
        receipt = served.update_weights(iter(halves(state)), version)
        assert receipt.version == version
        assert receipt.num_tensors == len(state)
        assert receipt.num_bytes == sum(tensor.numel() * 4 for tensor in state.values())
        assert receipt.fingerprints == {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in state.items()}
        adopt(other, state)
        outputs = run(served, requests)
        assert worst(other, requests, outputs) < EXACT
        assert {(o.policy_version, o.last_policy_version) for o in outputs} == {(version, version)}


def test_the_prefix_cache_is_used_and_never_outlives_its_weights(served: Any, other: Any) -> None:
    """A prompt of more than one block, asked before, during and after an update."""
    request = ask("x", [5 + at % 90 for at in range(127)], 4, max_tokens=1, stop_token_ids=())
    run(served, [request])
    state = changed(state_of(other), 1)
    served.update_weights(whole_shards(state), 1)
    adopt(other, state)
    assert worst(other, [request], run(served, [request])) < EXACT


def test_the_layout_names_every_tensor_once_and_whole(served: Any, other: Any) -> None:
    (layout,) = served.layout()
    assert dict(layout.boxes) == {name: Box.whole(tuple(t.shape)) for name, t in state_of(other).items()}
    assert {meta.dtype for meta in layout.tensors} == {"float32"}
    assert layout.tied == {}


def served_fingerprints(engine: Any) -> dict[str, int]:
    return joined(engine.engine.fingerprints(), 0)


def test_fingerprints_are_of_the_memory_that_serves(served: Any, other: Any) -> None:
    """Part of a fused parameter is overwritten behind the engine's back, by SGLang's own update."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    before, name = served_fingerprints(served), "model.layers.0.self_attn.q_proj.weight"
    tensors = pickle.dumps([(name, state_of(other)[name] + 1.0)])
    with served.engine._session():
        served.engine._sure(
            served.engine._front.update_weights_from_tensor(
                UpdateWeightsFromTensorReqInput(serialized_named_tensors=[tensors], flush_cache=False)
            )
        )
    after = served_fingerprints(served)
    assert {tensor for tensor in before if before[tensor] != after[tensor]} == {name}


DAMAGES = {
    "missing": "1 of [0-9]+ tensors were not covered, first 'model.norm.weight'",
    "unknown": "'model.norms.weight' is no tensor of this model; did you mean 'model.norm.weight'",
    "values": r"has shape \[128\]; a piece came at \[0\] of size \[42\], with values of shape \[3\]",
    "beyond": r"has shape \[128\]; a piece came at \[100\] of size \[42\]",
    "twice": r"the piece at \[0\] of size \[42\] overlaps the one at \[0\] of size \[42\]",
    "breaks off": "the line is dead",
}


def damaged(pieces: list[WeightShard], damage: str) -> Iterator[WeightShard]:
    yield from (piece for piece in pieces if piece.name != "model.norm.weight")
    low, high = (piece for piece in pieces if piece.name == "model.norm.weight")
    if damage == "unknown":
        yield replace(low, name="model.norms.weight")
    elif damage == "values":
        yield replace(low, tensor=low.tensor[:3])
    elif damage == "beyond":
        yield replace(low, box=Box((100,), low.box.size))
    elif damage == "breaks off":
        raise OSError("the line is dead")
    else:
        yield low
        if damage == "twice":
            yield low
            yield high


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_failed_update_serves_nothing_until_a_whole_one_comes(served: Any, other: Any, damage: str) -> None:
    pieces = halves(changed(state_of(other), 2))
    with pytest.raises((WeightSyncError, OSError), match=DAMAGES[damage]):
        served.update_weights(damaged(pieces, damage), 9)
    with pytest.raises(WeightSyncError, match="update to version 9 failed half-way; only a whole update mends it"):
        run(served, [ask("x", [5])])
    served.update_weights(iter(pieces), 10)
    assert run(served, [ask("x", [5])])[0].policy_version == 10


def test_an_update_is_refused_while_samples_run_and_changes_nothing(served: Any, other: Any) -> None:
    request = ask("x", [5, 6], 3, max_tokens=110, stop_token_ids=())
    expected = tokens_of(run(served, [request]))
    pieces = halves(changed(state_of(other), 3))

    async def update_midway() -> list[Any]:
        task = asyncio.create_task(collect(served, [request]))
        while not served.samples:
            await asyncio.sleep(0.001)
        with pytest.raises(WeightSyncError, match="version 7 came while 3 samples run; end, abort or pause them"):
            served.update_weights(iter(pieces), 7)
        with pytest.raises(RlsdkError, match="sleep was asked for while 3 samples run"):
            served.sleep()
        return await task

    outputs = asyncio.run(update_midway())
    assert tokens_of(outputs) == expected
    assert {o.policy_version for o in outputs} == {0}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_restores_service(served: Any, other: Any, level: int) -> None:
    before = tokens_of(run(served, [ask("x", [5, 6], 3)]))
    weights = sum(tensor.numel() * 4 for tensor in state_of(other).values())
    served.sleep(level)
    assert served.released_bytes >= 64 << 20
    assert (served.released_bytes >= (64 << 20) + weights) == (level == 2)
    with pytest.raises(RlsdkError, match="asleep: wake"):
        served.update_weights(whole_shards(state_of(other)), 1)
    served.wake(("weights",))
    if level == 2:
        served.update_weights(whole_shards(state_of(other)), 1)
    with pytest.raises(RlsdkError, match=r"asleep: wake \['kv_cache'\]"):
        run(served, [ask("x", [5])])
    served.wake(("kv_cache",))
    assert tokens_of(run(served, [ask("x", [5, 6], 3)])) == before


def test_weights_that_sleep_dropped_are_not_served(served: Any) -> None:
    served.sleep(2)
    served.wake()
    with pytest.raises(WeightSyncError, match="dropped by sleep: wake it, then update them"):
        run(served, [ask("x", [5])])


def test_an_engine_without_weights_serves_the_first_that_come(qwen2: Any, other: Any) -> None:
    engine = make_engine(qwen2, load_weights=False)
    try:
        with pytest.raises(WeightSyncError, match="no weights have come yet"):
            run(engine, [ask("x", [5])])
        engine.update_weights(whole_shards(state_of(other)), 4)
        requests = [ask("x", [5, 6], 3, max_tokens=20)]
        outputs = run(engine, requests)
        assert worst(other, requests, outputs) < EXACT
        assert {o.policy_version for o in outputs} == {4}
    finally:
        engine.close()
        engine.close()
    with pytest.raises(WeightSyncError, match="the engine was closed"):
        run(engine, [ask("x", [5])])


def test_logits_that_are_not_finite_are_an_error_and_not_a_sample(served: Any, other: Any) -> None:
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in state_of(other).items()}
    served.update_weights(whole_shards(state), 1)
    with pytest.raises(RlsdkError, match="not finite, with the weights of version 1"):
        run(served, [ask("x", [5, 6], 3)])
    assert not served.samples
