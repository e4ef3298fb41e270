"""Layouts to plan for, random and fixed, and the groups that let a manager run inside one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.interfaces import Box, TensorMeta, WeightLayout, WeightShard
from rlsdk.sharding.transports.transport import Outgoing, Transport
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine, tensor_layout, whole_boxes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32", seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(getattr(torch, dtype)) for n, s in shapes.items()}


def export(source: Transport, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Any:
    """One bucket's handle."""
    (handle,) = source.export([Outgoing.of(shards, dtypes)])
    return handle


def metas_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> list[TensorMeta]:
    return [TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()]


def split_box(shape: tuple[int, ...], axis: int, edges: Sequence[int]) -> list[Box]:
    """Cuts a tensor along one axis at `edges`; parts may be empty."""
    ends = [0, *edges, shape[axis]]
    return [
        Box((*(0,) * axis, low, *(0,) * (len(shape) - axis - 1)), (*shape[:axis], high - low, *shape[axis + 1 :]))
        for low, high in pairwise(ends)
    ]


def dim0_sharded(
    shapes: Mapping[str, tuple[int, ...]], parts: int, dtype: str = "float32", replicas: int = 1, **place: Any
) -> list[WeightLayout]:
    """As FSDP or HSDP lays weights: each replica cuts dimension 0 evenly; rank r is its own process."""
    layouts = []
    for rank in range(parts * replicas):
        boxes = []
        for name, shape in shapes.items():
            edges = [min(shape[0], -(-shape[0] // parts) * i) for i in range(1, parts)]
            boxes.append((name, split_box(shape, 0, edges)[rank % parts]))
        process = place.get("process", f"train:{rank}")
        layouts.append(tensor_layout(metas_of(shapes, dtype), boxes, rank=rank, process=process))
    return layouts


def whole_target(
    shapes: Mapping[str, tuple[int, ...]], rank: int = 0, dtype: str = "float32", process: str = "rollout", **more: Any
) -> WeightLayout:
    boxes = whole_boxes(shapes)
    return tensor_layout(metas_of(shapes, dtype), boxes, rank=rank, process=f"{process}:{rank}", **more)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    count = draw(st.integers(1, 4))
    dims = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
    return {f"layer.{i}": draw(dims) for i in range(count)}


def _edges(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))


@st.composite
def sources(draw: st.DrawFn, tensors: Mapping[str, tuple[int, ...]]) -> list[WeightLayout]:
    """1 to 8 ranks: replicas, each of which cuts each tensor along any dimension at any place, or not at all."""
    replicas, parts = draw(st.sampled_from([(1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (4, 2), (8, 1)]))
    aligned = draw(st.booleans())
    boxes: list[list[tuple[str, Box]]] = [[] for _ in range(replicas * parts)]
    for name, shape in tensors.items():
        cuts = None
        for replica in range(replicas):
            if cuts is None or not aligned:
                axis = draw(st.integers(0, len(shape) - 1)) if shape else 0
                cuts = split_box(shape, axis, _edges(draw, shape[axis], parts)) if shape else [Box((), ())]
            for part, box in enumerate(cuts):
                boxes[replica * parts + part].append((name, box))
    return [
        tensor_layout(
            metas_of(tensors),
            mine,
            rank=rank,
            node=draw(st.sampled_from(["a", "b"])),
            process=draw(st.sampled_from([f"p{rank}", "shared"])),
        )
        for rank, mine in enumerate(boxes)
    ]


@st.composite
def targets(draw: st.DrawFn, tensors: Mapping[str, tuple[int, ...]]) -> list[WeightLayout]:
    """1 to 3 places, each wanting whole tensors or disjoint parts of them."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
    layouts = []
    for rank in range(draw(st.integers(1, 3))):
        boxes = []
        for name, shape in tensors.items():
            parts = [Box.whole(shape)]
            if shape and draw(st.booleans()):
                axis = draw(st.integers(0, len(shape) - 1))
                cuts = split_box(shape, axis, _edges(draw, shape[axis], 3))
                parts = [box for box in cuts if draw(st.booleans())]
            boxes += [(name, box) for box in parts]
        layout = tensor_layout(
            metas_of(tensors, dtype),
            boxes,
            rank=rank,
            node=draw(st.sampled_from(["a", "b"])),
            process=draw(st.sampled_from([f"t{rank}", "shared"])),
        )
        layouts.append(layout)
    whole = tensor_layout(metas_of(tensors, dtype), whole_boxes(tensors), rank=len(layouts), node="a", process="last")
    return [*layouts, whole]


def train_group(tensors: Mapping[str, Tensor], layouts: Sequence[WeightLayout], **more: Any) -> LocalGroup:
    return LocalGroup([TrainHost(TensorTrainEngine(tensors, layout)) for layout in layouts], **more)


def rollout_group(replicas: Sequence[Sequence[WeightLayout]], **more: Any) -> LocalGroup:
    return LocalGroup([RolloutHost(TensorRolloutEngine(layouts)) for layouts in replicas], **more)
