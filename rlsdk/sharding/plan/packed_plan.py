"""A plan's transfers as columns (tens of bytes each); objects are created only on the rank that executes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import DTYPE_BYTES, Box, Bucket, ReshardPlan, TensorMeta, Transfer
from rlsdk.sharding.plan.box_table import BoxTable, Ints, cut_rows
from rlsdk.sharding.plan.holders import SAME_PROCESS

PIECE_BYTES = 2 << 20
"""Largest piece of a box in bytes: small enough for a cache, and for replicas to share the work evenly."""


@dataclass(frozen=True)
class Pieces:
    """Boxes with the source of each; `boxes.rank` is the target. Ordered by target, then by the target's order."""

    boxes: BoxTable
    source: Ints
    element_bytes: Ints
    distance: Ints

    @property
    def num_bytes(self) -> Ints:
        return self.boxes.numel * self.element_bytes

    def moved_by_source(self, num_sources: int) -> Ints:
        """`[num_sources]`: bytes that each source sends to other processes."""
        away = self.distance != SAME_PROCESS
        sent = np.bincount(self.source[away], self.num_bytes[away], minlength=num_sources)
        return sent.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Columns:
    """Transfers of one or all targets, not yet split into pieces, in the order in which targets receive them."""

    source: NDArray[np.int32]
    name: NDArray[np.int32]
    """Index of the tensor in the plan."""
    offset: Ints
    """`[N, D]`."""
    size: Ints
    """`[N, D]`."""
    transport: NDArray[np.int8]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, rows: slice) -> Columns:
        return Columns(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True, eq=False)
class PackedBuckets(Sequence[Bucket]):
    """The buckets of one target, created on first access. Only the columns are pickled."""

    target: int
    columns: Columns
    tensors: Mapping[int, TensorMeta]
    """The tensors that `columns.name` indexes, as far as they are used."""
    transports: tuple[str, ...]
    bucket_bytes: int
    readers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By source: `Bucket.readers`."""

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> Bucket: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Bucket]: ...
    def __getitem__(self, at: int | slice) -> Bucket | Sequence[Bucket]:
        return self._made[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedBuckets) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_made"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @cached_property
    def _made(self) -> tuple[Bucket, ...]:
        """The buckets: rounds of at most `bucket_bytes`, with one bucket for each source of the round."""
        rounds: list[dict[int, list[Transfer]]] = [{}]
        filled = 0
        routes: dict[int, str] = {}
        for giver, route, transfer in self.transfers():
            if filled + transfer.num_bytes > self.bucket_bytes:
                rounds.append({})
                filled = 0
            rounds[-1].setdefault(giver, []).append(transfer)
            routes[giver] = self.transports[route]
            filled += transfer.num_bytes
        return tuple(
            Bucket(
                source=giver,
                target=self.target,
                transport=routes[giver],
                transfers=tuple(transfers),
                num_bytes=sum(transfer.num_bytes for transfer in transfers),
                round=number,
                readers=self.readers.get(giver, ()),
            )
            for number, by_source in enumerate(rounds)
            for giver, transfers in sorted(by_source.items())
        )

    def largest_by_source(self, transport: str) -> dict[int, int]:
        """Bytes of the largest bucket of each source, over all transports except this one, without creating buckets."""
        boxes, origin, element_bytes = self._pieces()
        num_bytes = boxes.numel * element_bytes[origin]
        rounds = _rounds(num_bytes, self.bucket_bytes)
        key = rounds * (int(boxes.rank.max(initial=0)) + 1) + boxes.rank
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        totals = np.bincount(which.reshape(-1), num_bytes).astype(np.int64)
        names = np.array([name != transport for name in self.transports], bool)
        found: dict[int, int] = {}
        counted = names[self.columns.transport[origin[first]]]
        for source, total in zip(boxes.rank[first][counted].tolist(), totals[counted].tolist(), strict=True):
            found[source] = max(found.get(source, 0), total)
        return found

    def _pieces(self) -> tuple[BoxTable, Ints, Ints]:
        """(pieces that are sent at once, with sources as ranks; row of `columns` of each piece; bytes per element of
        each row)."""
        columns = self.columns
        widths = {at: DTYPE_BYTES[meta.dtype] for at, meta in self.tensors.items()}
        element_bytes = np.array([widths[at] for at in columns.name.tolist()], np.int64)
        limit = min(self.bucket_bytes, PIECE_BYTES) // element_bytes
        whole = BoxTable(columns.source.astype(np.int64), columns.name.astype(np.int64), columns.offset, columns.size)
        boxes, origin = cut_rows(whole, limit)
        return boxes, origin, element_bytes

    def transfers(self) -> Iterator[tuple[int, int, Transfer]]:
        """(source, index of its transport, transfer) of every piece, in order."""
        boxes, origin, element_bytes = self._pieces()
        widths = element_bytes[origin]
        lists = (boxes.rank, self.columns.transport[origin], boxes.name, boxes.offset, boxes.size, boxes.numel * widths)
        for giver, route, at, offset, size, num_bytes in zip(*(column.tolist() for column in lists), strict=True):
            meta = self.tensors[at]
            dims = len(meta.shape)
            box = Box(tuple(offset[:dims]), tuple(size[:dims]))
            yield giver, route, Transfer(name=meta.name, box=box, dtype=meta.dtype, num_bytes=num_bytes)


def _rounds(num_bytes: Ints, limit: int) -> Ints:
    """Round of each piece: a round ends before the piece that would exceed the limit."""
    ends = np.cumsum(num_bytes)
    begins = np.zeros(len(num_bytes) + 1, np.int64)
    start, before = 0, 0
    while (stop := int(np.searchsorted(ends, before + limit, side="right"))) < len(ends):
        start = max(stop, start + 1)
        begins[start] = 1
        before = int(ends[start - 1])
    return np.cumsum(begins[:-1])


@dataclass(frozen=True)
class PackedParts(Sequence[Sequence[Bucket]]):
    """A whole plan: one entry per target."""

    start: tuple[int, ...]
    """`[targets + 1]`: where each target's rows begin."""
    columns: Columns
    tensors: tuple[TensorMeta, ...]
    transports: tuple[str, ...]
    bucket_bytes: int
    readers: Mapping[int, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    """By target, then by source: `Bucket.readers`."""

    @classmethod
    def of(
        cls,
        pieces: Pieces,
        transport: Ints,
        transports: tuple[str, ...],
        tensors: tuple[TensorMeta, ...],
        num_targets: int,
        bucket_bytes: int,
        readers: Mapping[int, Mapping[int, tuple[int, ...]]] | None = None,
    ) -> PackedParts:
        boxes = pieces.boxes
        start = np.searchsorted(boxes.rank, np.arange(num_targets + 1))
        columns = Columns(
            source=pieces.source.astype(np.int32),
            name=boxes.name.astype(np.int32),
            offset=boxes.offset,
            size=boxes.size,
            transport=transport.astype(np.int8),
        )
        return cls(tuple(start.tolist()), columns, tensors, transports, bucket_bytes, readers or {})

    def __len__(self) -> int:
        return len(self.start) - 1

    @overload
    def __getitem__(self, at: int) -> PackedBuckets: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[PackedBuckets]: ...
    def __getitem__(self, at: int | slice) -> PackedBuckets | Sequence[PackedBuckets]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        mine = self.columns[self.start[at] : self.start[at + 1]]
        used = {i: self.tensors[i] for i in np.unique(mine.name).tolist()}
        return PackedBuckets(at, mine, used, self.transports, self.bucket_bytes, self.readers.get(at, {}))


def sources_of(buckets: Sequence[Bucket]) -> set[int]:
    """The sources that send something, without creating buckets."""
    if isinstance(buckets, PackedBuckets):
        return set(np.unique(buckets.columns.source).tolist())
    return {bucket.source for bucket in buckets}


def transports_of(plan: ReshardPlan) -> tuple[str, ...]:
    """Names of the transports that the plan uses, in order of preference."""
    parts = plan.parts
    if not isinstance(parts, PackedParts):
        return tuple(dict.fromkeys(bucket.transport for bucket in plan.buckets))
    used = np.bincount(parts.columns.transport, minlength=len(parts.transports))
    return tuple(name for name, count in zip(parts.transports, used.tolist(), strict=True) if count)


def bytes_by_route(plan: ReshardPlan) -> dict[tuple[int, int, str], int]:
    """Bytes by (source, target, transport)."""
    found: dict[tuple[int, int, str], int] = {}
    parts = plan.parts
    if not isinstance(parts, PackedParts):
        for bucket in plan.buckets:
            route = bucket.source, bucket.target, bucket.transport
            found[route] = found.get(route, 0) + bucket.num_bytes
        return found
    columns = parts.columns
    width = np.array([DTYPE_BYTES[meta.dtype] for meta in parts.tensors], np.int64)
    num_bytes = columns.size.prod(axis=1) * width[columns.name]
    target = np.repeat(np.arange(len(parts)), np.diff(parts.start))
    num_ways, num_targets = len(parts.transports), len(parts)
    key = (columns.source.astype(np.int64) * num_targets + target) * num_ways + columns.transport
    routes, which = np.unique(key, return_inverse=True)
    sums = np.zeros(len(routes), np.int64)
    np.add.at(sums, which.reshape(-1), num_bytes)
    for route, total in zip(routes.tolist(), sums.tolist(), strict=True):
        pair, way = divmod(route, num_ways)
        found[*divmod(pair, num_targets), parts.transports[way]] = total
    return found
