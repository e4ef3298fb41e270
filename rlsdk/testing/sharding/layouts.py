"""Layouts like those of real engines, with small artificial tensors: inputs for tests of sharding managers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from rlsdk.interfaces import Box, TensorMeta, WeightLayout
from rlsdk.testing.sharding.tensor_engines import tensor_layout

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (37, 12),
    "layers.0.qkv.weight": (24, 12),
    "layers.0.qkv.bias": (24,),
    "layers.0.down.weight": (12, 30),
    "layers.0.experts.up": (6, 10, 24),
    "layers.1.qkv.bias": (24,),
    "layers.1.wide.weight": (3, 600),
    "norm.weight": (12,),
    "scale": (),
}
"""An odd vocabulary, two biases of one shape, matrices split along either dimension, stacked experts, rows longer than
a bucket, and a scalar."""
TIED = {"head.weight": "embed.weight"}
ROLLOUT_DTYPES = {"norm.weight": "float32", "scale": "float32"}
"""Dtypes of engines that serve in bfloat16, except for these tensors."""
Dtypes = str | Mapping[str, str]
"""One dtype for all tensors, or dtypes by name (bfloat16 for the others)."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A training layout and the layouts of the replicas."""

    source: Sequence[WeightLayout]
    replicas: Sequence[Sequence[WeightLayout]]
    """For each replica, one layout per rank."""

    @property
    def target(self) -> list[WeightLayout]:
        return [layout for replica in self.replicas for layout in replica]


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(shape: tuple[int, ...], axis: int, parts: int) -> list[Box]:
    """Boxes of equal size along one axis; the last ones may be smaller or empty."""
    size = -(-shape[axis] // parts)
    return cut_at(shape, axis, [min(size * at, shape[axis]) for at in range(parts + 1)])


def cut_at(shape: tuple[int, ...], axis: int, ends: Sequence[int]) -> list[Box]:
    """Boxes between these positions on one axis."""
    return [
        Box(
            tuple(low if d == axis else 0 for d in range(len(shape))),
            tuple(high - low if d == axis else length for d, length in enumerate(shape)),
        )
        for low, high in pairwise(ends)
    ]


def sharded(parts: int, copies: int = 1, dtype: Dtypes = "float32") -> list[WeightLayout]:
    """Every tensor sharded along its first dimension, as in data-parallel engines; each copy is complete."""

    def boxes(shape: tuple[int, ...], rank: int) -> list[Box]:
        return [cut(shape, 0, parts)[rank % parts]]

    return [_layout(rank, "train", boxes, dtype) for rank in range(parts * copies)]


def uneven(dtype: Dtypes = "float32") -> list[WeightLayout]:
    """As `sharded`, in three parts: a fifth, somewhat more than a third, and the rest."""

    def boxes(shape: tuple[int, ...], rank: int) -> list[Box]:
        length = shape[0]
        return [cut_at(shape, 0, [0, length // 5, length // 2 + length % 2, length])[rank]]

    return [_layout(rank, "train", boxes, dtype) for rank in range(3)]


def mesh(rows: int, columns: int) -> list[WeightLayout]:
    """Matrices split along two dimensions; vectors along one, equal in every column."""

    def boxes(shape: tuple[int, ...], rank: int) -> list[Box]:
        first = cut(shape, 0, rows)[rank // columns]
        if len(shape) < 2:
            return [first]
        common = first.intersect(cut(shape, 1, columns)[rank % columns])
        return [common] if common is not None else []

    return [_layout(rank, "train", boxes) for rank in range(rows * columns)]


def expert_parallel(parts: int) -> list[WeightLayout]:
    """Every rank has every `parts`-th expert, each as its own box, and all other tensors whole."""

    def boxes(shape: tuple[int, ...], rank: int) -> list[Box]:
        return cut(shape, 0, shape[0])[rank::parts] if len(shape) == 3 else [Box.whole(shape)]

    return [_layout(rank, "train", boxes) for rank in range(parts)]


def split(parts: int, kind: str, replica: int = 0, dtype: Dtypes = "float32") -> list[WeightLayout]:
    """Matrices split along the dimension that tensor parallelism splits; every rank has the other tensors whole."""

    def boxes(shape: tuple[int, ...], rank: int) -> list[Box]:
        if len(shape) < 2:
            return [Box.whole(shape)]
        inner = shape in (SHAPES["layers.0.down.weight"], SHAPES["layers.0.experts.up"])
        return [cut(shape, 1 if inner else 0, parts)[rank]]

    return [_layout(rank, f"{kind}-{replica}", boxes, dtype) for rank in range(parts)]


def complete(replica: int, dtype: Dtypes = "float32") -> list[WeightLayout]:
    """One rank that wants all tensors."""
    return [_layout(0, f"rollout-{replica}", lambda shape, rank: [Box.whole(shape)], dtype)]


def placed(layouts: Sequence[WeightLayout], **where: str) -> list[WeightLayout]:
    """The same layouts on another node, device or process."""
    return [replace(layout, **where) for layout in layouts]  # type: ignore[arg-type]


def with_head(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """The same layouts with their own head, which the sources tie to the embedding."""
    found = []
    for layout in layouts:
        metas = {meta.name: meta for meta in layout.tensors}
        head = replace(metas["embed.weight"], name="head.weight")
        box = next(box for name, box in layout.boxes if name == "embed.weight")
        found.append(replace(layout, tensors=(*layout.tensors, head), boxes=(*layout.boxes, ("head.weight", box))))
    return found


def tied(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """The same layouts, with the head tied to the embedding."""
    return [replace(layout, tied=TIED) for layout in layouts]


@functools.cache
def in_one_process(replicas: int = 1) -> Pair:
    """One rank and its replicas in one process: the cheapest pair to sync."""
    return Pair(
        source=placed(sharded(1), process="one"),
        replicas=[placed(complete(replica), process="one") for replica in range(replicas)],
    )


@functools.cache
def copies(number: int, replicas: int) -> Pair:
    """Two shards, each on several ranks."""
    return Pair(source=sharded(2, copies=number), replicas=[complete(replica) for replica in range(replicas)])


@functools.cache
def chain() -> Pair:
    """Two ranks on one node, and three replicas on another: one replica may forward to the others."""
    replicas = [placed(complete(replica), node="b") for replica in range(3)]
    return Pair(source=placed(sharded(2), node="a"), replicas=replicas)


@functools.cache
def apart() -> Pair:
    """As `chain`, to workers on another node than their replica's process."""
    workers = [placed(layouts, worker="w") for layouts in chain().replicas]
    return Pair(
        source=chain().source,
        replicas=[[replace(layout, is_apart=True) for layout in layouts] for layouts in workers],
    )


@functools.cache
def pairs() -> dict[str, Pair]:
    """The changes of layout that every manager must support."""
    both = sharded(2, copies=2)
    return {
        "one rank to one": Pair(source=sharded(1), replicas=[complete(0)]),
        "sharded to whole, two replicas": Pair(source=sharded(3), replicas=[complete(0), complete(1)]),
        "copies of shards to whole": copies(2, 2),
        "four copies to four replicas": copies(4, 4),
        "sharded to tensor parallel": Pair(source=sharded(4), replicas=[split(2, "rollout")]),
        "tensor parallel to another": Pair(
            source=split(3, "train"), replicas=[split(2, "rollout"), complete(1), split(3, "rollout", 2)]
        ),
        "more ranks than rows": Pair(source=sharded(16), replicas=[complete(0)]),
        "uneven shards": Pair(source=uneven(), replicas=[split(2, "rollout")]),
        "cut along two dimensions": Pair(source=mesh(2, 2), replicas=[split(3, "rollout")]),
        "expert parallel to tensor parallel": Pair(source=expert_parallel(4), replicas=[split(2, "rollout")]),
        "a tied head, served by itself": Pair(source=tied(sharded(2)), replicas=[with_head(complete(0))]),
        "tied on both sides": Pair(source=tied(sharded(2)), replicas=[tied(complete(0))]),
        "float32 to bfloat16": Pair(source=sharded(2), replicas=[complete(0, "bfloat16")]),
        "float32 to bfloat16 and float32": Pair(source=sharded(2), replicas=[complete(0, ROLLOUT_DTYPES)]),
        "bfloat16 to float32": Pair(source=sharded(2, dtype="bfloat16"), replicas=[complete(0)]),
        "bfloat16 to bfloat16 and float32": Pair(
            source=sharded(3, dtype="bfloat16"), replicas=[split(2, "rollout", dtype=ROLLOUT_DTYPES)]
        ),
        "in one process": in_one_process(),
        "partly in one process": Pair(
            source=[replace(layout, process=f"both:{layout.rank}") for layout in sharded(2)],
            replicas=[[replace(layout, process=f"both:{layout.rank}") for layout in split(2, "rollout")]],
        ),
        "ranks in another order": Pair(
            source=[*both[::-1], *expert_parallel(2)][:4], replicas=[split(2, "rollout")[::-1]]
        ),
        "two nodes": Pair(
            source=[*placed(both[:2], node="a"), *placed(both[2:], node="b")],
            replicas=[placed(complete(0), node="b"), placed(complete(1), node="a")],
        ),
    }


@functools.cache
def tied_pairs() -> dict[str, Pair]:
    """Sources with tied names that only some ranks know, several for one tensor, or the only one that is served."""
    head = complete(0)
    late = [replace(layout, boxes=tuple(e for e in layout.boxes if e[0] != "embed.weight")) for layout in sharded(1)]
    late = [
        replace(layout, tensors=tuple(meta for meta in layout.tensors if meta.name != "embed.weight"))
        for layout in late
    ]
    names = {**TIED, "decoder.weight": "embed.weight"}
    decoder = [_renamed(layout, "embed.weight", "decoder.weight") for layout in complete(1)]
    return {
        "the first rank has no part of it": Pair(
            source=[*late, *(replace(layout, rank=1, process="train:1") for layout in tied(sharded(1)))],
            replicas=[with_head(head)],
        ),
        "two names of one tensor": Pair(
            source=[replace(layout, tied=names) for layout in sharded(2)],
            replicas=[_joined(with_head(head), decoder)],
        ),
        "the other name alone": Pair(
            source=tied(sharded(2)), replicas=[[_renamed(layout, "embed.weight", "head.weight") for layout in head]]
        ),
    }


def _renamed(layout: WeightLayout, name: str, other: str) -> WeightLayout:
    return replace(
        layout,
        tensors=tuple(replace(meta, name=other) if meta.name == name else meta for meta in layout.tensors),
        boxes=tuple((other if held == name else held, box) for held, box in layout.boxes),
    )


def _joined(layouts: Sequence[WeightLayout], others: Sequence[WeightLayout]) -> list[WeightLayout]:
    """The same layouts with the tensors that only `others` have."""
    found = []
    for layout, other in zip(layouts, others, strict=True):
        known = {meta.name for meta in layout.tensors}
        tensors = tuple(meta for meta in other.tensors if meta.name not in known)
        boxes = tuple(entry for entry in other.boxes if entry[0] not in known)
        found.append(replace(layout, tensors=layout.tensors + tensors, boxes=layout.boxes + boxes))
    return found


@functools.cache
def distant_pairs() -> dict[str, Pair]:
    """Pairs for planning only, with nodes and devices that do not exist here."""
    whole = sharded(1, copies=3)
    return {
        "to another node": Pair(source=placed(sharded(2), node="a"), replicas=[placed(complete(0), node="b")]),
        "devices of one name on two nodes": Pair(
            source=[
                replace(layout, node=node, device=device)
                for layout, node, device in zip(whole[:2], "ab", ("cuda:GPU-1", "cuda:GPU-0"), strict=True)
            ],
            replicas=[placed(complete(0), node="a", device="cuda:GPU-0")],
        ),
        "two devices of one node": Pair(
            source=[replace(layout, device=f"cuda:GPU-{layout.rank}") for layout in whole],
            replicas=[placed(complete(0), device="cuda:GPU-2"), placed(complete(1), device="cuda:GPU-1")],
        ),
    }


def _layout(
    rank: int, kind: str, boxes_of: Callable[[tuple[int, ...], int], Sequence[Box]], dtype: Dtypes = "float32"
) -> WeightLayout:
    boxes = [
        (name, box)
        for name, shape in SHAPES.items()
        for box in (boxes_of(shape, rank) if shape else [Box.whole(shape)])
    ]

    def dtype_of(name: str) -> str:
        return dtype if isinstance(dtype, str) else dtype.get(name, "bfloat16")

    metas = [TensorMeta(name=name, shape=shape, dtype=dtype_of(name)) for name, shape in SHAPES.items()]
    return tensor_layout(metas, boxes, rank=rank, process=f"{kind}:{rank}")
