"""Weights between real processes, and what stays behind when one of them is killed."""

import gc
import time

import pytest
import torch
from sharding_cases import random_tensors, rollout_group, whole_target
from sharding_processes import train_processes

from rlsdk.interfaces import Box, WeightSyncError
from rlsdk.sharding import GenericShardingManager

SHAPES = {"embed": (1000, 64), "layer.w": (300, 200), "layer.b": (7,), "scale": (3, 5, 2), "norm": (64,)}

GONE = "(WorkerError|WeightSyncError: the source is gone)"
"""From the call for the next bucket, or from the one that was under way: whichever looks first."""


def shared_mappings() -> int:
    """Blocks of weights that this process maps, once the frames of a caught error are gone."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("rlsdk-" in line for line in maps)


@pytest.mark.parametrize(("dtype", "shared"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_two_sources_bring_their_shards_bit_for_bit_again_and_again(dtype: str, shared: bool) -> None:
    values = random_tensors(SHAPES)
    with train_processes(SHAPES, 2, shared=shared) as train:
        rollout = rollout_group([[whole_target(SHAPES, dtype=dtype)]])
        manager = GenericShardingManager(train, rollout, bucket_bytes=60_000)
        ends = manager.ends()
        plan = manager.plan(ends.source, ends.target)
        assert {bucket.transport for bucket in plan.buckets} == {"ring"}
        for version in range(4):
            manager.sync_weights(plan, version)
            for name, box, tensor in rollout.hosts[0].engine.served:
                assert torch.equal(tensor, values[name][box.slices(Box.whole(SHAPES[name]))].to(tensor.dtype))
            train.run("optim_step")
            values = {name: tensor + 0.125 for name, tensor in values.items()}
        assert shared_mappings() <= 4
        rollout.hosts[0].target.close()
    assert shared_mappings() == 0


@pytest.mark.parametrize(
    ("end", "reason", "shared"),
    [("kill", GONE, False), ("hang", "DeadlineError", False), ("kill", GONE, True)],
)
def test_a_source_that_ends_in_the_middle_is_an_error_soon_and_leaves_nothing(
    end: str, reason: str, shared: bool
) -> None:
    with train_processes(SHAPES, 1, fatal=2, end=end, shared=shared) as train:
        rollout = rollout_group([[whole_target(SHAPES)]])
        manager = GenericShardingManager(train, rollout, bucket_bytes=60_000, timeout_s=3.0)
        ends = manager.ends()
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"did not arrive from source rank 0 by ring: {reason}"):
            manager.sync_weights(manager.plan(ends.source, ends.target), 1)
        assert time.monotonic() - start < 20
        assert all(tensor.count_nonzero() == 0 for _, _, tensor in rollout.hosts[0].engine.served)
        rollout.hosts[0].target.close()
    assert shared_mappings() == 0
