"""Many boxes stored as columns, on which the planner computes: a million boxes take seconds instead of minutes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import LayoutError, TensorMeta, WeightLayout, nearest

Ints: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint64]

MAX_PAIRS = 1 << 22
"""Candidate pairs processed together: bounds the memory of a join."""


@dataclass(frozen=True)
class BoxTable:
    """N boxes of named tensors. Tensors with fewer dimensions are padded with ones at the end."""

    rank: Ints
    """`[N]`: index of the layout that lists the box."""
    name: Ints
    """`[N]`: index of the tensor's name."""
    offset: Ints
    """`[N, D]`."""
    size: Ints
    """`[N, D]`."""

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: NDArray[Any]) -> BoxTable:
        """Rows by index or mask."""
        if rows.dtype == np.bool_:
            if rows.all():
                return self
            rows = np.flatnonzero(rows)
        # For contiguous rows several times as fast as indexing.
        return BoxTable(*(values.take(rows, axis=0) for values in (self.rank, self.name, self.offset, self.size)))

    def joined(self, other: BoxTable) -> BoxTable:
        """These boxes, followed by the others."""
        return concatenated((self, other))

    @property
    def numel(self) -> Ints:
        """`[N]`: elements of each box."""
        total: Ints = np.prod(self.size, axis=1, dtype=np.int64)
        return total

    def measure(self) -> Hashes:
        """`[N]`: a pseudo-random product measure modulo 2**64. Boxes tile a box if and only if their measures sum to
        its measure, except with a probability near 2**-58 (Schwartz-Zippel: the difference is a multilinear form in
        the hashes)."""
        total = np.ones(len(self), np.uint64)
        for axis in range(self.offset.shape[1]):
            low = self.offset[:, axis]
            total *= mix(low + self.size[:, axis], axis) - mix(low, axis)
        return total


def concatenated(tables: Sequence[BoxTable]) -> BoxTable:
    """Concatenates tables, of which there must be at least one."""
    return BoxTable(
        np.concatenate([table.rank for table in tables]),
        np.concatenate([table.name for table in tables]),
        np.concatenate([table.offset for table in tables]),
        np.concatenate([table.size for table in tables]),
    )


def mix(values: Ints, salt: int = 0) -> Hashes:
    """64 pseudo-random bits for each integer (the finalizer of splitmix64; Steele et al. 2014)."""
    x = values.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (salt + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def pack(layouts: Sequence[WeightLayout], tensors: Mapping[str, TensorMeta], num_dims: int) -> BoxTable:
    """All non-empty boxes of all layouts, in order.

    Args:
        layouts: the layouts of one side.
        tensors: every tensor that they list; the position of a name is its index.
        num_dims: D, at least the number of dimensions of any tensor.

    Raises:
        LayoutError: a box names a tensor that is not listed, has another number of dimensions, or exceeds its shape.
    """
    # There may be millions of boxes: per-box work is done by `map` with C functions.
    index = defaultdict(lambda: -1, zip(tensors, count(), strict=False))
    counts = np.fromiter((len(layout.boxes) for layout in layouts), np.int64, len(layouts))
    total = int(counts.sum())
    entries = [entry for layout in layouts for entry in layout.boxes]
    boxes = list(map(itemgetter(1), entries))
    name = np.fromiter(map(index.__getitem__, map(itemgetter(0), entries)), np.int64, total)
    sizes = list(map(attrgetter("size"), boxes))
    dims = np.fromiter((len(meta.shape) for meta in tensors.values()), np.int64, len(tensors))
    found = np.fromiter(map(len, sizes), np.int64, total)
    shapes = np.ones((len(tensors), num_dims), np.int64)
    filled = np.arange(num_dims) < dims[:, None]
    shapes[filled] = np.fromiter(chain.from_iterable(meta.shape for meta in tensors.values()), np.int64)
    inner = np.arange(num_dims) < found[:, None]
    offset, size = np.zeros((total, num_dims), np.int64), np.ones((total, num_dims), np.int64)
    wrong = (name < 0) | (dims[name] != found)
    if not wrong.any():
        offset[inner] = np.fromiter(chain.from_iterable(map(attrgetter("offset"), boxes)), np.int64)
        size[inner] = np.fromiter(chain.from_iterable(sizes), np.int64)
        wrong = (offset + size > shapes[name]).any(axis=1)
    if wrong.any():
        _refuse(layouts, tensors, int(wrong.argmax()))
    table = BoxTable(np.repeat(np.arange(len(layouts)), counts), name, offset, size)
    return table.take(table.numel > 0)


def _refuse(layouts: Sequence[WeightLayout], tensors: Mapping[str, TensorMeta], row: int) -> None:
    layout, name, box = next(
        (layout, *entry)
        for at, (layout, entry) in enumerate((layout, entry) for layout in layouts for entry in layout.boxes)
        if at == row
    )
    if name not in tensors:
        raise LayoutError(
            f"rank {layout.rank} lists a box of {name!r}, which is not among the tensors of its layout"
            f"{nearest(name, tensors)}"
        )
    raise LayoutError(
        f"rank {layout.rank} lists a box of {name!r} at offset {list(box.offset)} of size {list(box.size)}: beyond the "
        f"tensor's shape {list(tensors[name].shape)}"
    )


def ragged(counts: Ints) -> Ints:
    """Concatenates 0..n-1 for each n of `counts`."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def distinct(table: BoxTable) -> tuple[Ints, Ints]:
    """(first row of each distinct (name, box), index of the distinct one of each row). Ordered by name, then box."""
    columns = [table.name]
    for axis in range(table.offset.shape[1]):
        columns += [table.offset[:, axis], table.size[:, axis]]
    code, span = np.zeros(len(table), np.int64), 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if span * width >= 2**63:
            values, code = np.unique(code, return_inverse=True)
            span = len(values)
        code, span = code * width + column, span * width
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def overlaps(wanted: BoxTable, held: BoxTable) -> Iterator[tuple[Ints, Ints, BoxTable]]:
    """(rows of `wanted`, rows of `held`, intersections) of all pairs of one name that share an element; `rank` of the
    intersections is the row of `wanted`. Pairs of a wanted row are contiguous, in chunks of bounded size."""
    if not len(wanted) or not len(held):
        return
    span = int(max((table.offset[:, 0] + table.size[:, 0]).max() for table in (wanted, held))) + 1
    order = np.lexsort((held.offset[:, 0], held.name))
    key = held.name[order] * span + held.offset[order, 0]
    longest = np.zeros(int(max(wanted.name.max(), held.name.max())) + 1, np.int64)
    np.maximum.at(longest, held.name, held.size[:, 0])
    low = np.maximum(wanted.offset[:, 0] - longest[wanted.name] + 1, 0)
    first = np.searchsorted(key, wanted.name * span + low)
    count = np.searchsorted(key, wanted.name * span + wanted.offset[:, 0] + wanted.size[:, 0]) - first
    seen = np.cumsum(count)
    start = 0
    while start < len(wanted):
        limit = (seen[start - 1] if start else 0) + MAX_PAIRS
        stop = max(start + 1, int(np.searchsorted(seen, limit, side="right")))
        some = slice(start, stop)
        left = np.repeat(np.arange(start, stop), count[some])
        right = order[np.repeat(first[some], count[some]) + ragged(count[some])]
        offset = np.maximum(wanted.offset[left], held.offset[right])
        size = np.minimum(wanted.offset[left] + wanted.size[left], held.offset[right] + held.size[right]) - offset
        real = (size > 0).all(axis=1)
        yield left[real], right[real], BoxTable(left[real], wanted.name[left[real]], offset[real], size[real])
        start = stop


def cut_rows(table: BoxTable, max_elements: Ints) -> tuple[BoxTable, Ints]:
    """Splits boxes into pieces of at most `max_elements` (`[N]`, at least one), in storage order: runs of whole rows if
    a row fits. Also returns the row of `table` that each piece belongs to."""
    origin = np.arange(len(table))
    while (large := table.numel > max_elements[origin]).any():
        axis, row = first_axis(table)
        step = np.maximum(max_elements[origin] // row, 1)
        at = np.arange(len(table))
        length = np.where(large, table.size[at, axis], 1)
        step = np.where(large, step, 1)
        counts = -(-length // step)
        parent, start = np.repeat(at, counts), ragged(counts)
        pieces, big = table.take(parent), large[parent]
        start *= step[parent]
        where = (np.flatnonzero(big), axis[parent][big])
        pieces.offset[where] += start[big]
        pieces.size[where] = np.minimum(step[parent], length[parent] - start)[big]
        table, origin = pieces, origin[parent]
    return table, origin


def first_axis(table: BoxTable) -> tuple[Ints, Ints]:
    """For each box: the first dimension with more than one index, and the number of elements per index of it."""
    axis = (table.size > 1).argmax(axis=1)
    behind = np.cumprod(table.size[:, ::-1], axis=1)[:, ::-1]
    at = np.arange(len(table))
    return axis, behind[at, axis] // table.size[at, axis]
