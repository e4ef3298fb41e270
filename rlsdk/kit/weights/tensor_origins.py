"""Traces the values of a tensor to canonical tensors, through slices, copies and concatenations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlsdk.interfaces import Box


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a tensor whose values are those of a box of a canonical tensor."""

    box: Box
    """The box in the tensor."""
    name: str
    """Name of the canonical tensor."""
    start: tuple[int, ...]
    """Offset in the canonical tensor."""
    dims: tuple[int | None, ...]
    """For each dimension of the tensor, the dimension of the canonical tensor; None: a dimension of size 1."""

    def origin(self) -> Box:
        """The box of the canonical tensor."""
        size = [1] * len(self.start)
        for dim, length in zip(self.dims, self.box.size, strict=True):
            if dim is not None:
                size[dim] = length
        return Box(self.start, tuple(size))

    def moved(self, dim: int, by: int) -> Part:
        """The same values, shifted along one dimension of the tensor."""
        offset = list(self.box.offset)
        offset[dim] += by
        return Part(box=Box(tuple(offset), self.box.size), name=self.name, start=self.start, dims=self.dims)

    def stacked(self, dim: int, at: int) -> Part:
        """The same values in a tensor with one more dimension."""
        offset, size, dims = list(self.box.offset), list(self.box.size), list(self.dims)
        offset.insert(dim, at)
        size.insert(dim, 1)
        dims.insert(dim, None)
        return Part(box=Box(tuple(offset), tuple(size)), name=self.name, start=self.start, dims=tuple(dims))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor that a loader receives, with another name or shape than the canonical tensors that it consists of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Source:
        """The source that is one whole canonical tensor."""
        box = Box.whole(tuple(shape))
        part = Part(box=box, name=name, start=box.offset, dims=tuple(range(len(shape))))
        return cls(name=name, shape=tuple(shape), parts=(part,))

    def packed(self) -> list[Any]:
        """As plain values."""
        return [self.name, self.shape, [[p.box.offset, p.box.size, p.name, p.start, p.dims] for p in self.parts]]

    @classmethod
    def unpacked(cls, values: Sequence[Any]) -> Source:
        name, shape, parts = values
        return cls(
            name=name,
            shape=tuple(shape),
            parts=tuple(
                Part(box=Box(tuple(offset), tuple(size)), name=of, start=tuple(start), dims=tuple(dims))
                for offset, size, of, start, dims in parts
            ),
        )


def place_of(view: Tensor, whole: Tensor) -> tuple[Box, list[int | None]] | None:
    """The box of a contiguous tensor that a view covers, and for each dimension of the view the tensor's dimension
    (None: of size 1). None if it is not a box with the dimensions in the tensor's order; the view may have fewer."""
    size, dims, following = [1] * whole.dim(), [], 0
    for length, stride in zip(view.shape, view.stride(), strict=True):
        dim = None
        if length != 1:
            candidates = (d for d in range(following, whole.dim()) if whole.stride(d) == stride and whole.shape[d] > 1)
            dim = next(candidates, None)
            if dim is None:
                return None
            size[dim], following = length, dim + 1
        dims.append(dim)
    left, offset = view.storage_offset(), []
    for length, stride in zip(whole.shape, whole.stride(), strict=True):
        # The stride of a dimension of size 1 is arbitrary.
        at = 0 if length == 1 else left // stride
        left -= at * stride
        offset.append(at)
    box = Box(tuple(offset), tuple(size))
    inside = box.intersect(Box.whole(tuple(whole.shape))) == box or math.prod(box.size) == 0
    return (box, dims) if inside else None


def seen(part: Part, box: Box, dims: Sequence[int | None]) -> Part | None:
    """The part of a view that comes from `part`, a part of the whole tensor.

    Args:
        part: in the whole tensor.
        box: of the whole tensor that the view covers.
        dims: for each dimension of the view, that of the whole tensor.
    """
    common = part.box.intersect(box)
    if common is None:
        return None
    start = list(part.start)
    for dim, origin in enumerate(part.dims):
        if origin is not None:
            start[origin] += common.offset[dim] - part.box.offset[dim]
    return Part(
        box=Box(
            tuple(0 if dim is None else common.offset[dim] - box.offset[dim] for dim in dims),
            tuple(1 if dim is None else common.size[dim] for dim in dims),
        ),
        name=part.name,
        start=tuple(start),
        dims=tuple(None if dim is None else part.dims[dim] for dim in dims),
    )
