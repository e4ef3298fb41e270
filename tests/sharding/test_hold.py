"""The copy of the weights that is published while the next step trains."""

from __future__ import annotations

import pytest
import torch
from sharding_cases import dim0_sharded, random_tensors, rollout_group, train_group, whole_target

from rlsdk.interfaces import Box, LayoutError, Transfer
from rlsdk.sharding import GenericShardingManager, WeightSource

SHAPES = {"embed": (40, 8), "layer.w": (16, 24), "norm": (8,)}


def made(dtype: str) -> tuple[GenericShardingManager, WeightSource, dict[str, torch.Tensor]]:
    """One training rank with float32 weights, and one replica that serves `dtype`."""
    tensors = random_tensors(SHAPES)
    train = train_group(tensors, dim0_sharded(SHAPES, 1))
    manager = GenericShardingManager(train, rollout_group([[whole_target(SHAPES, 0, dtype)]]), bucket_bytes=512)
    return manager, train.hosts[0].source, tensors


def sync(manager: GenericShardingManager, version: int) -> None:
    ends = manager.ends()
    manager.sync_weights(manager.plan(ends.source, ends.target), version)


def served(manager: GenericShardingManager) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, _, tensor in manager.rollout.hosts[0].engine.served}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4), ("float64", 4)])
def test_the_copy_is_of_the_dtype_that_travels_and_what_is_served_is_the_same(dtype: str, width: int) -> None:
    manager, source, tensors = made(dtype)
    sync(manager, 1)
    assert source.held_bytes() == 0
    engine = manager.train.hosts[0].engine  # type: ignore[attr-defined]
    for version in (2, 3):
        engine.optim_step()
        source.hold()
        expected = {name: tensor.to(getattr(torch, dtype), copy=True) for name, _, tensor in engine.held}
        engine.optim_step()  # the next step trains meanwhile
        sync(manager, version)
        source.release()
        assert source.held_bytes() == width * sum(tensor.numel() for tensor in tensors.values())
        assert {name: tensor.tolist() for name, tensor in served(manager).items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }


def test_before_any_sync_the_copy_is_whole() -> None:
    manager, source, tensors = made("bfloat16")
    source.hold()
    assert source.held_bytes() == 4 * sum(tensor.numel() for tensor in tensors.values())
    sync(manager, 1)
    source.release()
    source.hold()
    assert source.held_bytes() == 2 * sum(tensor.numel() for tensor in tensors.values())


def test_a_copy_in_a_narrower_dtype_is_not_given_for_a_wider_one() -> None:
    manager, source, _ = made("bfloat16")
    sync(manager, 1)
    source.hold()
    wide = Transfer(name="norm", box=Box.whole((8,)), dtype="float32", num_bytes=32)
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"'norm' is asked for in float32, and held in torch.bfloat16"):
            source.fingerprints([wide])
    source.release()
    assert source.fingerprints([wide]).keys() == {"norm"}
    source.hold()
    assert source.fingerprints([wide]).keys() == {"norm"}
