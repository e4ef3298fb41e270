"""Holders: the atoms of every target box, and the sources that hold each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from operator import attrgetter

import numpy as np

from rlsdk.interfaces import LayoutError, TensorMeta, WeightLayout, nearest
from rlsdk.sharding.plan.box_table import BoxTable, Ints, concatenated, distinct, mix, overlaps, ragged

ELSEWHERE, SAME_NODE, SAME_DEVICE, SAME_PROCESS = 3, 2, 1, 0
"""Distance of a source from a target."""


def distinct_tensors(layouts: Sequence[WeightLayout]) -> list[TensorMeta]:
    """The distinct tensors of all layouts, in the order of their first occurrence."""
    # Uses `map` with C functions: a large plan has millions, and comparing two of these objects runs in Python.
    what = attrgetter("name", "shape", "dtype", "scales")
    lists = {id(layout.tensors): layout.tensors for layout in layouts}  # forecasts of equal ranks share them
    seen = dict.fromkeys(chain.from_iterable(map(what, tensors) for tensors in lists.values()))
    return [TensorMeta(name=name, shape=shape, dtype=dtype, scales=scales) for name, shape, dtype, scales in seen]


class SourceTensors:
    """The tensors of the sources, by name."""

    def __init__(self, source: Sequence[WeightLayout]) -> None:
        self.tensors: dict[str, TensorMeta] = {}
        self.tied: dict[str, str] = {}
        for layout in source:
            self.tied.update(layout.tied)
        self._check_tied(source)
        for meta in distinct_tensors(source):
            known = self.tensors.setdefault(meta.name, meta)
            if known != meta:
                rank = next(layout.rank for layout in source if meta in layout.tensors)
                raise LayoutError(
                    f"source ranks disagree on {meta.name!r}: {list(known.shape)} {known.dtype} on one, "
                    f"{list(meta.shape)} {meta.dtype} on rank {rank}"
                )

    def _check_tied(self, source: Sequence[WeightLayout]) -> None:
        """A rank that does not know a tied name could not send the tensor by this name."""
        for layout in source:
            if layout.tied == self.tied:
                continue
            held = {meta.name for meta in layout.tensors}
            for name, shared in self.tied.items():
                if shared in held and name not in layout.tied:
                    raise LayoutError(
                        f"source rank {layout.rank} holds {shared!r} and does not list {name!r} as tied to it, which "
                        "another rank does: `layout().tied` has the same names on every rank that holds the tensor"
                    )

    def resolve(self, name: str) -> str:
        """The name under which the sources hold what a target calls `name`.

        Raises:
            LayoutError: no source holds it.
        """
        held = name if name in self.tensors else self.tied.get(name, name)
        if held not in self.tensors:
            raise LayoutError(
                f"the target asks for {name!r}, which no source rank holds{nearest(name, self.tensors)}; "
                f"the sources hold {len(self.tensors)} tensors"
            )
        return held


@dataclass(frozen=True)
class RankSets:
    """Sets of source ranks, concatenated: set i is `members[start[i] : start[i + 1]]`, ascending."""

    start: Ints
    members: Ints

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> RankSets:
        counts = np.array([len(members) for members in sets], np.int64)
        flat = [member for members in sets for member in members]
        return cls(np.concatenate(([0], np.cumsum(counts))), np.array(flat, np.int64))

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def counts(self) -> Ints:
        return np.diff(self.start)

    def take(self, rows: Ints) -> RankSets:
        counts = self.counts[rows]
        members = self.members[np.repeat(self.start[rows], counts) + ragged(counts)]
        return RankSets(np.concatenate(([0], np.cumsum(counts))), members)

    def joined(self, other: RankSets) -> RankSets:
        """These sets, followed by the others."""
        return RankSets(
            np.concatenate((self.start, self.start[-1] + other.start[1:])),
            np.concatenate((self.members, other.members)),
        )

    def distinct(self) -> tuple[RankSets, Ints]:
        """The distinct sets, and for each set the index of its distinct one. Found by hash, then compared."""
        if not len(self):
            return self, np.zeros(0, np.int64)
        _, first, which = np.unique(
            np.add.reduceat(mix(self.members), self.start[:-1]), return_index=True, return_inverse=True
        )
        few, which = self.take(first), which.reshape(-1)
        again = few.take(which)
        if not np.array_equal(again.start, self.start) or not np.array_equal(again.members, self.members):
            return self, np.arange(len(self))
        return few, which


@dataclass(frozen=True)
class Atoms:
    """Parts of wanted boxes, such that every source holds an atom completely or not at all."""

    boxes: BoxTable
    """`[A]`: ordered by wanted box and position. `rank` is the row of the wanted box."""
    holders: Ints
    """`[A]`: index into `sets`."""
    sets: RankSets


def find_atoms(wanted: BoxTable, held: BoxTable, tensors: Sequence[TensorMeta]) -> Atoms:
    """Splits distinct wanted boxes into atoms.

    Args:
        wanted: distinct boxes; `name` as in the sources.
        held: boxes of all sources.
        tensors: the tensors that `name` indexes, for messages.

    Raises:
        LayoutError: no source holds a part of a wanted box.
    """
    first, which = distinct(held)
    by_box = np.lexsort((held.rank, which))
    counts = np.bincount(which, minlength=len(first))
    sets, set_of_box = RankSets(np.concatenate(([0], np.cumsum(counts))), held.rank[by_box]).distinct()
    boxes = held.take(first)
    parts: list[BoxTable] = []
    holders: list[Ints] = []
    added: dict[tuple[int, ...], int] = {}
    left_over = np.ones(len(wanted), bool)
    for left, right, shared in overlaps(wanted, boxes):
        measured = np.zeros(len(wanted), np.uint64)
        np.add.at(measured, left, shared.measure())
        rows = np.unique(left)
        tiled = rows[measured[rows] == wanted.take(rows).measure()]
        left_over[tiled] = False
        clean = np.isin(left, tiled)
        parts.append(shared.take(clean))
        holders.append(set_of_box[right[clean]])
        for row in np.setdiff1d(rows, tiled):
            left_over[row] = False
            pairs = left == row
            cells, owners = _grid(wanted.take(np.array([row])), shared.take(pairs), tensors)
            owning = [np.flatnonzero(owner) for owner in owners]
            members = [np.unique(sets.take(set_of_box[right[pairs]][own]).members).tolist() for own in owning]
            parts.append(BoxTable(np.full(len(cells), row), cells.name, cells.offset, cells.size))
            holders.append(np.array([len(sets) + added.setdefault(tuple(m), len(added)) for m in members], np.int64))
    if left_over.any():
        _missing(wanted.take(np.flatnonzero(left_over)[:1]), tensors, 0)
    if not parts:
        empty = np.zeros(0, np.int64)
        return Atoms(wanted, empty, sets)
    atoms, owner = concatenated(parts), np.concatenate(holders)
    order = np.lexsort((*(atoms.offset[:, d] for d in reversed(range(atoms.offset.shape[1]))), atoms.rank))
    return Atoms(atoms.take(order), owner[order], sets.joined(RankSets.of(list(added))) if added else sets)


def _grid(box: BoxTable, shared: BoxTable, tensors: Sequence[TensorMeta]) -> tuple[BoxTable, list[list[bool]]]:
    """The cells of one wanted box between the edges of overlapping held boxes, with runs of equal owners joined along
    the last dimension; and which of `shared` own each cell."""
    low, high = box.offset[0], box.offset[0] + box.size[0]
    starts, ends = shared.offset, shared.offset + shared.size
    edges = [np.unique(np.concatenate((starts[:, d], ends[:, d], [low[d], high[d]]))).tolist() for d in range(len(low))]
    offsets: list[list[int]] = []
    sizes: list[list[int]] = []
    owners: list[list[bool]] = []
    for cell in product(*map(pairwise, edges)):
        begin, end = np.array([c[0] for c in cell]), np.array([c[1] for c in cell])
        owner: list[bool] = np.all((starts <= begin) & (end <= ends), axis=1).tolist()
        if not any(owner):
            hole = BoxTable(box.rank, box.name, begin[None], (end - begin)[None])
            _missing(hole, tensors, len(shared))
        if owners and owners[-1] == owner and offsets[-1][:-1] == begin[:-1].tolist() and cell[-1][0] != low[-1]:
            sizes[-1][-1] += int(end[-1] - begin[-1])
        else:
            offsets.append(begin.tolist())
            sizes.append((end - begin).tolist())
            owners.append(owner)
    count = len(offsets)
    return BoxTable(np.zeros(count, np.int64), np.repeat(box.name, count), np.array(offsets), np.array(sizes)), owners


def _missing(hole: BoxTable, tensors: Sequence[TensorMeta], touching: int) -> None:
    meta = tensors[int(hole.name[0])]
    offset, size = (values[0, : len(meta.shape)].tolist() for values in (hole.offset, hole.size))
    raise LayoutError(
        f"{meta.name!r}: the part at offset {offset} of size {size} is wanted, but no "
        f"source rank holds it ({touching} source boxes touch what is wanted)"
    )


@dataclass(frozen=True)
class Places:
    """Nodes, devices and processes of the ranks as numbers: equal numbers mean equal places."""

    process: Ints
    node: Ints
    device: Ints

    @classmethod
    def of(cls, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> tuple[Places, Places]:
        """(places of the sources, places of the targets)."""
        seen: tuple[dict[object, int], ...] = ({}, {}, {})
        columns = [
            [
                [known.setdefault(key, len(known)) for known, key in zip(seen, _keys(layout), strict=True)]
                for layout in side
            ]
            for side in (source, target)
        ]
        first, second = (cls(*np.array(rows, np.int64).reshape(-1, 3).T) for rows in columns)
        return first, second

    def distance(self, rows: Ints, other: Places, columns: Ints) -> Ints:
        """Distance of each of these places from one of the other side."""
        far = np.where(self.node[rows] == other.node[columns], SAME_NODE, ELSEWHERE)
        far[self.device[rows] == other.device[columns]] = SAME_DEVICE
        far[self.process[rows] == other.process[columns]] = SAME_PROCESS
        return far


def _keys(layout: WeightLayout) -> tuple[object, object, object]:
    return layout.process, layout.node, (layout.node, layout.device)


def tied_to(target: Sequence[WeightLayout]) -> Mapping[str, str]:
    """Every tied name of the targets -> the name under which they hold the tensor."""
    return {alias: name for layout in target for alias, name in layout.tied.items()}
