"""Forms in which a source may yield the tensors of an update: memory layouts, pieces, borrowed buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import Box, WeightShard


class MemoryLayout:
    """Memory layout of a piece."""

    def __init__(self, lay: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.lay, self.dtype = lay, dtype


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()


def _with_gaps(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _inside(tensor: Tensor) -> Tensor:
    """At an odd offset in a longer buffer."""
    flat = torch.full((tensor.numel() + 7,), float("nan"), dtype=tensor.dtype)
    flat[3 : 3 + tensor.numel()] = tensor.reshape(-1)
    return flat[3 : 3 + tensor.numel()].view(tensor.shape)


def _padded(tensor: Tensor) -> Tensor:
    """Rows of a wider tensor, of which only the first columns are used."""
    if tensor.dim() != 2:
        return _inside(tensor)
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 5), float("nan"), dtype=tensor.dtype)
    wide[:, 2:-3] = tensor
    return wide[:, 2:-3]


MEMORY_LAYOUTS: Mapping[str, MemoryLayout] = {
    "transposed": MemoryLayout(_transposed),
    "with gaps": MemoryLayout(_with_gaps, torch.bfloat16),
    "inside of another": MemoryLayout(_inside, torch.float64),
    "that record gradients": MemoryLayout(lambda tensor: tensor.clone().requires_grad_()),
    "in padded rows": MemoryLayout(_padded, torch.float16),
}


def cut_at_random(state: Mapping[str, Tensor], layout: MemoryLayout, seed: int) -> Iterator[WeightShard]:
    """Every tensor in two to six pieces along either dimension; names and pieces in random order."""
    source = random.Random(seed)
    for name in source.sample(list(state), len(state)):
        tensor = state[name]
        whole = Box.whole(tuple(tensor.shape))
        boxes = [whole]
        for _ in range(source.randrange(1, 4)):
            box = boxes.pop(source.randrange(len(boxes)))
            dimension = source.randrange(len(box.size))
            if box.size[dimension] < 2:
                boxes.append(box)
                continue
            boxes += _halves(box, dimension, source.randrange(1, box.size[dimension]))
        for box in source.sample(boxes, len(boxes)):
            yield WeightShard(name=name, box=box, tensor=layout.lay(tensor[box.slices(whole)].to(layout.dtype)))


def _halves(box: Box, dimension: int, at: int) -> list[Box]:
    """A box, split in two."""
    low, high, offset = list(box.size), list(box.size), list(box.offset)
    low[dimension], high[dimension] = at, box.size[dimension] - at
    offset[dimension] += at
    return [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]


def borrowed(shards: Iterator[WeightShard]) -> Iterator[WeightShard]:
    """The same items, each in one buffer that is overwritten before the next item."""
    items = list(shards)
    buffer = torch.empty(max(item.tensor.numel() for item in items))
    for item in items:
        buffer[: item.tensor.numel()] = item.tensor.reshape(-1)
        yield replace(item, tensor=buffer[: item.tensor.numel()].view(item.tensor.shape))
        buffer.fill_(float("nan"))
