"""What lies behind an update: the memory that serves, and what the engine refuses while it has no whole weights."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import torch

from rlsdk.interfaces import RlsdkError, WeightSyncError
from rlsdk.kit.weights.weight_updates import join_fingerprints
from rlsdk.testing.rollout.lab import collect, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of


def test_fingerprints_are_of_the_memory_that_serves(lab: Any) -> None:
    """Part of a fused parameter is overwritten behind the engine's back, by SGLang's own update."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    served, name = lab.inner.engine, "model.layers.0.self_attn.q_proj.weight"
    before = join_fingerprints(served.fingerprints(), 0)
    tensors = pickle.dumps([(name, lab.base[name] + 1.0)])
    with served._session():
        served._sure(
            served._front.update_weights_from_tensor(
                UpdateWeightsFromTensorReqInput(serialized_named_tensors=[tensors], flush_cache=False)
            )
        )
    after = join_fingerprints(served.fingerprints(), 0)
    assert {tensor for tensor in before if before[tensor] != after[tensor]} == {name}


def test_an_update_is_refused_while_samples_run_and_changes_nothing(lab: Any) -> None:
    request = lab.ask("x", [5, 6], 3, max_tokens=110)
    expected = tokens_of(lab.run([request]))

    async def update_midway() -> list[Any]:
        task = asyncio.create_task(collect(lab.engine, [request]))
        while not lab.inner.samples:
            await asyncio.sleep(0.001)
        with pytest.raises(
            WeightSyncError, match="version 7 arrived while 3 samples are running; finish, abort or pause them first"
        ):
            lab.engine.update_weights(whole_shards(lab.changed(3)), 7)
        with pytest.raises(RlsdkError, match=r"sleep\(\) was called while 1 calls of generate\(\) are running"):
            lab.engine.sleep()
        return await task

    outputs = lab.wait(update_midway())
    assert tokens_of(outputs) == expected
    assert {o.policy_version for o in outputs} == {0}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_restores_service(lab: Any, level: int) -> None:
    engine, request = lab.engine, lab.ask("x", [5, 6], 3)
    before = tokens_of(lab.run([request]))
    weights = sum(tensor.numel() * 4 for tensor in lab.base.values())
    engine.sleep(level)
    assert lab.inner.released_bytes >= 64 << 20
    assert (lab.inner.released_bytes >= (64 << 20) + weights) == (level == 2)
    with pytest.raises(RlsdkError, match="asleep: call wake"):
        lab.restore()
    engine.wake(("weights",))
    if level == 2:
        lab.restore()
    with pytest.raises(RlsdkError, match=r"asleep: call wake\(\['kv_cache'\]\)"):
        lab.run([request])
    engine.wake(("kv_cache",))
    assert tokens_of(lab.run([request])) == before


def test_logits_that_are_not_finite_are_an_error_and_not_a_sample(lab: Any) -> None:
    lab.engine.update_weights(whole_shards({n: torch.full_like(t, torch.nan) for n, t in lab.base.items()}), 1)
    with pytest.raises(RlsdkError, match="not finite, with the weights of version 1"):
        lab.run([lab.ask("x", [5, 6], 3)])
    assert not lab.inner.samples
    # SGLang's attention on a CPU multiplies what it masks, with 0: keys and values that are NaN must not stay.
    lab.engine.sleep()
    lab.engine.wake()
