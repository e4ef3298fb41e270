"""Shards of parameters: DeepSpeed splits flattened tensors, so a rank has a range of a parameter's flat elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsdk.interfaces import Box
from rlsdk.kit.weights.flat_boxes import boxes_of_range

Range = tuple[int, int]
"""First flat element, and the one after the last."""
ALIGNMENT = 2
"""ZeRO 1 and 2 pad a flat group to a multiple of this many elements per rank."""


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    ranges: Sequence[Range]
    """Of each rank; all are equal where every rank has the whole parameter."""
    rank: int
    flat: Tensor
    """The one-dimensional tensor that contains this rank's elements: what the optimizer steps."""
    offset: int
    """Where in it they start."""
    parts: Sequence[tuple[Box, Tensor]] = field(init=False)
    """This rank's boxes, each with a view of `flat`."""

    def __post_init__(self) -> None:
        parts, at, held = [], 0, self.held
        for box in boxes_of_range(self.shape, *self.range):
            parts.append((box, held[at : at + box.numel].view(box.size)))
            at += box.numel
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def range(self) -> Range:
        return self.ranges[self.rank]

    @property
    def boxes(self) -> Sequence[Box]:
        return tuple(box for box, _ in self.parts)

    @property
    def held(self) -> Tensor:
        """This rank's elements: a view."""
        return self.of(self.flat)

    def of(self, flat: Tensor) -> Tensor:
        """The elements of this piece in a tensor that is laid out as `flat` (a moment of the optimizer)."""
        start, stop = self.range
        return flat.detach()[self.offset : self.offset + stop - start]

    @torch.no_grad()
    def fill(self, box: Box, values: Tensor) -> None:
        """Copies the values of one of this rank's boxes."""
        next(view for mine, view in self.parts if mine == box).copy_(values)

    def gather(self, writer: int, dtype: torch.dtype) -> Tensor | None:
        """Gathers the whole tensor in `dtype` on rank `writer`; None on the others. Collective: every rank must
        call."""
        if all(ends == (0, math.prod(self.shape)) for ends in self.ranges):
            return self.held.to(dtype).view(self.shape) if self.rank == writer else None
        # Equal chunks of raw bytes, padded: every backend can gather these, for any dtype.
        chunk = max(stop - start for start, stop in self.ranges)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mine = torch.zeros(chunk, dtype=dtype, device=device)
        mine[: len(self.held)] = self.held
        found = [torch.empty_like(mine) for _ in self.ranges] if self.rank == writer else None
        dist.gather(mine.view(torch.uint8), found and [part.view(torch.uint8) for part in found], dst=writer)
        if found is None:
            return None
        whole = torch.empty(math.prod(self.shape), dtype=dtype, device=device)
        for (start, stop), part in zip(self.ranges, found, strict=True):
            whole[start:stop] = part[: stop - start]
        return whole.view(self.shape)


@dataclass(frozen=True)
class Group:
    """Parameters that are flattened into one tensor, which is split over ranks."""

    flat: Tensor
    """This rank's part."""
    parameters: Sequence[nn.Parameter]


def pieces_of(
    groups: Sequence[Group], names: Mapping[int, str], shapes: Mapping[str, tuple[int, ...]], stage: int, place: Range
) -> list[Piece]:
    """The pieces of this rank.

    Args:
        groups: what DeepSpeed flattened.
        names: `id` of a parameter -> its canonical name.
        shapes: of whole parameters, by canonical name; gives the order.
        stage: of ZeRO; 0: every rank has the whole parameters.
        place: this rank, and the number of ranks.
    """
    rank, world = place
    found: dict[str, Piece] = {}
    for group in groups:
        members = [names[id(parameter)] for parameter in group.parameters]
        ranges = split({name: shapes[name] for name in members}, stage, world)
        offset = 0
        for name in members:
            start, stop = ranges[name][rank]
            found[name] = Piece(name, shapes[name], ranges[name], rank, group.flat, offset)
            offset += padded(shapes[name], world) if stage == 3 else stop - start
    return [found[name] for name in shapes]


def split(shapes: Mapping[str, tuple[int, ...]], stage: int, world: int) -> dict[str, list[Range]]:
    """Each rank's range of the parameters of one flat group, as DeepSpeed splits them: ZeRO 3 splits every parameter,
    ZeRO 1 and 2 the whole group."""
    found: dict[str, list[Range]] = {}
    if stage in (0, 3):
        for name, shape in shapes.items():
            numel, chunk = math.prod(shape), padded(shape, world) if stage else 0
            ends = [(min(rank * chunk, numel), min((rank + 1) * chunk, numel)) for rank in range(world)]
            found[name] = ends if stage else [(0, numel)] * world
        return found
    total = sum(math.prod(shape) for shape in shapes.values())
    part = -(-total // (ALIGNMENT * world)) * ALIGNMENT
    first = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        found[name] = [
            (min(max(rank * part - first, 0), numel), min(max((rank + 1) * part - first, 0), numel))
            for rank in range(world)
        ]
        first += numel
    return found


def padded(shape: tuple[int, ...], world: int) -> int:
    """Elements that ZeRO 3 keeps of a parameter on each rank, the last ones filled up."""
    return -(-math.prod(shape) // world)
