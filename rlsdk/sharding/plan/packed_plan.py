"""A plan's transfers as columns (tens of bytes each); objects are created only on the rank that executes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import eq
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import DTYPE_BYTES, Box, Bucket, ReshardPlan, TensorMeta, Transfer
from rlsdk.sharding.plan.box_table import BoxTable, Ints, cut_rows
from rlsdk.sharding.plan.matching import PIECE_BYTES, Matching, Pieces
from rlsdk.sharding.plan.routes import Routes


@dataclass(frozen=True, eq=False)
class Columns:
    """Transfers of one target, not yet split into pieces, in the order in which it receives them."""

    source: NDArray[np.int32]
    name: NDArray[np.int32]
    """Index of the tensor in the plan."""
    offset: Ints
    """`[N, D]`."""
    size: Ints
    """`[N, D]`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, pieces: Pieces) -> Columns:
        boxes = pieces.boxes
        return cls(pieces.source.astype(np.int32), boxes.name.astype(np.int32), boxes.offset, boxes.size)


class LazyBuckets(Sequence[Bucket]):
    """Buckets that are created on first access."""

    @property
    @abstractmethod
    def _made(self) -> tuple[Bucket, ...]: ...

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> Bucket: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Bucket]: ...
    def __getitem__(self, at: int | slice) -> Bucket | Sequence[Bucket]:
        return self._made[at]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass(frozen=True, eq=False)
class PackedBuckets(LazyBuckets):
    """The buckets of one target, created on first access. Only the columns are pickled, and made for it."""

    target: int
    contents: Columns | Callable[[], Columns]
    tensors: Sequence[TensorMeta] | Mapping[int, TensorMeta]
    """The tensors that `columns.name` indexes; once pickled, as far as they are used."""
    transports: Mapping[int, str]
    """By source."""
    bucket_bytes: int
    readers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By source: `Bucket.readers`."""

    @cached_property
    def columns(self) -> Columns:
        return self._contents()

    def _contents(self) -> Columns:
        return self.contents if isinstance(self.contents, Columns) else self.contents()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedBuckets) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        # Not kept: the controller pickles the columns of each target, and reads none.
        columns = vars(self).get("columns") or self._contents()
        return {
            "target": self.target,
            "contents": columns,
            "tensors": {at: self.tensors[at] for at in np.unique(columns.name).tolist()},
            "transports": self.transports,
            "bucket_bytes": self.bucket_bytes,
            "readers": self.readers,
        }

    @cached_property
    def _made(self) -> tuple[Bucket, ...]:
        """The buckets: rounds of at most `bucket_bytes`, with one bucket for each source of the round."""
        rounds: list[dict[int, list[Transfer]]] = [{}]
        filled = 0
        for giver, transfer in self.transfers():
            if filled + transfer.num_bytes > self.bucket_bytes:
                rounds.append({})
                filled = 0
            rounds[-1].setdefault(giver, []).append(transfer)
            filled += transfer.num_bytes
        return tuple(
            Bucket(
                source=giver,
                target=self.target,
                transport=self.transports[giver],
                transfers=tuple(transfers),
                num_bytes=sum(transfer.num_bytes for transfer in transfers),
                round=number,
                readers=self.readers.get(giver, ()),
            )
            for number, by_source in enumerate(rounds)
            for giver, transfers in sorted(by_source.items())
        )

    def largest_by_source(self) -> dict[int, int]:
        """Bytes of the largest bucket of each source, without creating buckets."""
        boxes, origin, element_bytes = self._pieces()
        num_bytes = boxes.numel * element_bytes[origin]
        rounds = _rounds(num_bytes, self.bucket_bytes)
        key, which = np.unique(rounds * (int(boxes.rank.max(initial=0)) + 1) + boxes.rank, return_inverse=True)
        totals = np.bincount(which.reshape(-1), num_bytes).astype(np.int64)
        source = key % (int(boxes.rank.max(initial=0)) + 1)
        largest = np.zeros(int(source.max(initial=-1)) + 1, np.int64)
        np.maximum.at(largest, source, totals)
        return {at: int(largest[at]) for at in np.flatnonzero(largest).tolist()}

    def _pieces(self) -> tuple[BoxTable, Ints, Ints]:
        """(pieces that are sent at once, with sources as ranks; row of `columns` of each piece; bytes per element of
        each row)."""
        columns = self.columns
        names, which = np.unique(columns.name, return_inverse=True)
        widths = np.array([DTYPE_BYTES[self.tensors[at].dtype] for at in names.tolist()], np.int64)
        element_bytes = widths[which.reshape(-1)]
        limit = min(self.bucket_bytes, PIECE_BYTES) // element_bytes
        whole = BoxTable(columns.source.astype(np.int64), columns.name.astype(np.int64), columns.offset, columns.size)
        boxes, origin = cut_rows(whole, limit)
        return boxes, origin, element_bytes

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        """(source, transfer) of every piece, in order."""
        boxes, origin, element_bytes = self._pieces()
        lists = (boxes.rank, boxes.name, boxes.offset, boxes.size, boxes.numel * element_bytes[origin])
        for giver, at, offset, size, num_bytes in zip(*(column.tolist() for column in lists), strict=True):
            meta = self.tensors[at]
            dims = len(meta.shape)
            box = Box(tuple(offset[:dims]), tuple(size[:dims]))
            yield giver, Transfer(name=meta.name, box=box, dtype=meta.dtype, num_bytes=num_bytes)


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


@dataclass(frozen=True, eq=False)
class JoinedBuckets(LazyBuckets):
    """The buckets of several targets, one target after the other, created on first access."""

    parts: tuple[Sequence[Bucket], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JoinedBuckets) and self.parts == other.parts

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}

    @cached_property
    def _made(self) -> tuple[Bucket, ...]:
        return tuple(bucket for part in self.parts for bucket in part)


@dataclass(frozen=True, eq=False)
class PackedParts(Sequence[Sequence[Bucket]]):
    """A whole plan: one entry per target, made when it is read."""

    matching: Matching
    routes: Routes
    chosen: Ints
    """`[routes]`: index into `transports`."""
    transports: tuple[str, ...]
    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int
    readers: Mapping[int, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    """By target, then by source: `Bucket.readers`."""

    def __len__(self) -> int:
        return len(self.matching.wants)

    @overload
    def __getitem__(self, at: int) -> PackedBuckets: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[PackedBuckets]: ...
    def __getitem__(self, at: int | slice) -> PackedBuckets | Sequence[PackedBuckets]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        first, last = np.searchsorted(self.routes.target, (at, at + 1)).tolist()
        ways = zip(self.routes.source[first:last].tolist(), self.chosen[first:last].tolist(), strict=True)
        return PackedBuckets(
            target=at,
            contents=partial(self._columns, at),
            tensors=self.tensors,
            transports={source: self.transports[way] for source, way in ways},
            bucket_bytes=self.bucket_bytes,
            readers=self.readers.get(at, {}),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedParts) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _columns(self, target: int) -> Columns:
        return Columns.of(self.matching.pieces(target))

    def sharing(self, target: int) -> tuple[int, bytes] | None:
        """Equal for targets that receive the same pieces from the same sources. None: unknown."""
        matching = self.matching
        if matching.is_cut[target]:
            return None
        pairs = slice(matching.pair_start[target], matching.pair_start[target + 1])
        return int(matching.wants[target]), matching.pair_source[pairs].tobytes()


def sources_of(buckets: Sequence[Bucket]) -> set[int]:
    """The sources that send something, without creating buckets."""
    if isinstance(buckets, PackedBuckets):
        return set(buckets.transports)
    return {bucket.source for bucket in buckets}


def transports_of(plan: ReshardPlan) -> tuple[str, ...]:
    """Names of the transports that the plan uses, in order of preference."""
    parts = plan.parts
    if not isinstance(parts, PackedParts):
        return tuple(dict.fromkeys(bucket.transport for bucket in plan.buckets))
    used = np.bincount(parts.chosen, minlength=len(parts.transports))
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
    routes = parts.routes
    columns = (routes.source, routes.target, parts.chosen, routes.num_bytes)
    for source, target, way, num_bytes in zip(*(column.tolist() for column in columns), strict=True):
        found[source, target, parts.transports[way]] = num_bytes
    return found
