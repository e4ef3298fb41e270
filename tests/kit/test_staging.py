"""Weights on their way through a block of memory arrive whole, whatever their shape and the size of the block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.interfaces import Box, WeightShard
from rlsdk.kit.weights.staging import attached, batches, copied

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@settings(deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    room=st.integers(64, 600),
    shift=st.integers(0, 3),
    through_memory=st.booleans(),
)
def test_every_element_arrives_once_at_its_place(
    shapes: list[tuple[int, ...]], room: int, shift: int, through_memory: bool
) -> None:
    """Rows that are larger than the block too, as those of stacked experts are."""
    tensors = {f"t{at}": torch.randn(shape, dtype=torch.float64) for at, shape in enumerate(shapes)}
    shards = [
        WeightShard(name=name, box=Box(tuple(shift for _ in tensor.shape), tuple(tensor.shape)), tensor=tensor)
        for name, tensor in tensors.items()
    ]
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    times = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in tensors.items()}
    boxes = {shard.name: shard.box for shard in shards}

    def take(parts: object) -> None:
        for part in parts:  # type: ignore[attr-defined]
            place = part.box.slices(boxes[part.name])
            found[part.name][place] = part.tensor
            times[part.name][place] += 1
            assert math.prod(part.box.size) * 8 <= room

    for block in batches(iter(shards), room):
        if through_memory:
            with attached(block.name, block.entries) as parts:
                take(parts)
        else:
            take(copied(block.values(), block.entries))
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert bool((times[name] == 1).all())


def test_a_block_without_room_for_an_element_is_an_error() -> None:
    shard = WeightShard(name="w", box=Box((0,), (2,)), tensor=torch.zeros(2))
    with pytest.raises(ValueError, match="a block of 3 bytes has no room for 'w'"):
        list(batches(iter([shard]), 3))
