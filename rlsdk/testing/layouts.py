"""Layouts as engines lay weights, of small made-up tensors: what sharding managers are tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rlsdk.interfaces import Box, TensorMeta, WeightLayout
from rlsdk.testing.tensor_engines import tensor_layout

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (37, 12),
    "layers.0.qkv.weight": (24, 12),
    "layers.0.qkv.bias": (24,),
    "layers.0.down.weight": (12, 30),
    "norm.weight": (12,),
    "scale": (),
}
"""An odd vocabulary, a bias, matrices cut along either dimension, and a number that is no vector."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A training layout and what the replicas want."""

    source: Sequence[WeightLayout]
    replicas: Sequence[Sequence[WeightLayout]]
    """Per replica, one layout per place."""

    @property
    def target(self) -> list[WeightLayout]:
        return [layout for replica in self.replicas for layout in replica]


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(shape: tuple[int, ...], axis: int, parts: int) -> list[Box]:
    """Boxes of equal size along one axis, as far as they go; the last may be smaller, or empty."""
    size = -(-shape[axis] // parts)
    ends = [min(size * at, shape[axis]) for at in range(parts + 1)]
    return [
        Box(
            tuple(low if d == axis else 0 for d in range(len(shape))),
            tuple(high - low if d == axis else length for d, length in enumerate(shape)),
        )
        for low, high in pairwise(ends)
    ]


def sharded(parts: int, copies: int = 1, dtype: str = "float32") -> list[WeightLayout]:
    """Every tensor cut along its first dimension, as data-parallel engines do; each copy is whole."""
    return [_layout(rank, "train", parts, lambda shape: 0, dtype) for rank in range(parts * copies)]


def split(parts: int, kind: str, replica: int = 0, dtype: str = "float32") -> list[WeightLayout]:
    """Matrices cut along the dimension that tensor parallelism cuts; what it does not cut, every rank has whole."""

    def axis(shape: tuple[int, ...]) -> int | None:
        if len(shape) < 2:
            return None
        return 1 if shape == SHAPES["layers.0.down.weight"] else 0

    return [_layout(rank, f"{kind}-{replica}", parts, axis, dtype) for rank in range(parts)]


def complete(replica: int, dtype: str = "float32") -> list[WeightLayout]:
    """One place that wants everything."""
    return [_layout(0, f"rollout-{replica}", 1, lambda shape: None, dtype)]


def pairs() -> dict[str, Pair]:
    """The swaps that every manager has to know."""
    return {
        "one rank to one": Pair(source=sharded(1), replicas=[complete(0)]),
        "sharded to whole, two replicas": Pair(source=sharded(3), replicas=[complete(0), complete(1)]),
        "copies of shards to whole": Pair(source=sharded(2, copies=2), replicas=[complete(0), complete(1)]),
        "sharded to tensor parallel": Pair(source=sharded(4), replicas=[split(2, "rollout")]),
        "tensor parallel to another": Pair(source=split(3, "train"), replicas=[split(2, "rollout"), complete(1)]),
        "more ranks than rows": Pair(source=sharded(16), replicas=[complete(0)]),
        "float32 to bfloat16": Pair(source=sharded(2), replicas=[complete(0, "bfloat16")]),
    }


def _layout(rank: int, kind: str, parts: int, axis_of: object, dtype: str) -> WeightLayout:
    assert callable(axis_of)
    boxes = []
    for name, shape in SHAPES.items():
        axis = axis_of(shape) if shape else None
        boxes.append((name, Box.whole(shape) if axis is None else cut(shape, axis, parts)[rank % parts]))
    metas = [TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape in SHAPES.items()]
    return tensor_layout(metas, boxes, rank=rank, process=f"{kind}:{rank}")
