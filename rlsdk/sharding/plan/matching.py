"""Chooses the source of every part of every wanted box.

Targets that want the same boxes, as replicas do, share one list of parts. Only what differs between them is stored for
each: which holders of a part are nearest, and where a target's parts begin on the line along which equally near holders
take turns. The pieces of one target are made when they are read: for n sources and n replicas of them there are n * n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import DTYPE_BYTES, Box, TensorMeta, WeightLayout
from rlsdk.sharding.plan.balance import Turns
from rlsdk.sharding.plan.box_table import BoxTable, Ints, cut_rows, distinct, first_axis, pack, ragged
from rlsdk.sharding.plan.holders import SAME_PROCESS, Atoms, Places, RankSets, SourceTensors, find_atoms
from rlsdk.sharding.plan.routes import Routes

PIECE_BYTES = 2 << 20
"""Largest piece of a box in bytes: small enough for a cache, and for replicas to share the work evenly."""


@dataclass(frozen=True)
class Sides:
    """Both sides as columns."""

    held: BoxTable
    """Boxes of the sources; `name` is an index into `tensors`."""
    wanted: BoxTable
    """Distinct lists of boxes, each in the order in which its targets receive them; `rank` is the list, `name` is an
    index into `wire`."""
    wants: Ints
    """`[targets]`: the list that each target wants."""
    held_name: Ints
    """`[wire]`: position in `tensors` of the source's tensor for each wanted name."""
    tensors: tuple[TensorMeta, ...]
    """Tensors as the sources hold them."""
    element_bytes: Ints
    """`[wire]`: bytes of an element on the wire."""
    places: tuple[Places, Places]

    @classmethod
    def of(
        cls,
        source: Sequence[WeightLayout],
        target: Sequence[WeightLayout],
        held: SourceTensors,
        wire: Mapping[str, TensorMeta],
    ) -> Sides:
        position = {name: at for at, name in enumerate(held.tensors)}
        num_dims = max((len(meta.shape) for meta in held.tensors.values()), default=1) or 1
        lists, wants = _distinct_wants(target)
        return cls(
            held=pack(source, held.tensors, num_dims),
            wanted=_in_order(pack(lists, wire, num_dims)),
            wants=wants,
            held_name=np.array([position[held.resolve(name)] for name in wire], np.int64),
            tensors=tuple(held.tensors.values()),
            element_bytes=np.array([DTYPE_BYTES[meta.dtype] for meta in wire.values()], np.int64),
            places=Places.of(source, target),
        )


def _distinct_wants(target: Sequence[WeightLayout]) -> tuple[list[WeightLayout], Ints]:
    """(the first target with each list of boxes, `[targets]` index of each target's list)."""
    lists: list[WeightLayout] = []
    by_boxes: dict[tuple[tuple[str, Box], ...], int] = {}
    by_object: dict[int, int] = {}  # Forecasts of equal replicas share one object, whose boxes are then read once.
    wants = np.zeros(len(target), np.int64)
    for at, layout in enumerate(target):
        if id(layout.boxes) not in by_object:
            found = by_boxes.setdefault(tuple(layout.boxes), len(lists))
            if found == len(lists):
                lists.append(layout)
            by_object[id(layout.boxes)] = found
        wants[at] = by_object[id(layout.boxes)]
    return lists, wants


def _in_order(table: BoxTable) -> BoxTable:
    """Sorted by list, then by the position of the name in it, then by box."""
    if not len(table):
        return table
    key = table.rank * (int(table.name.max()) + 1) + table.name
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    dims = range(table.offset.shape[1])
    sizes, offsets = [table.size[:, d] for d in dims], [table.offset[:, d] for d in dims]
    order = np.lexsort((*reversed(sizes), *reversed(offsets), first[which.reshape(-1)]))
    return table.take(order)


@dataclass(frozen=True)
class Pieces:
    """What one target receives, in its order."""

    boxes: BoxTable
    source: Ints
    num_bytes: Ints


@dataclass(frozen=True)
class Matching:
    """The source of every piece. A *pair* is a target and a set of holders of some of its parts."""

    parts: BoxTable
    """`[parts]`: of each list of wanted boxes, such that every source holds a part completely or not at all; `rank` is
    the list."""
    num_bytes: Ints
    """`[parts]`"""
    start: Ints
    """`[lists + 1]`: first part of each list."""
    pair_in_list: Ints
    """`[parts]`: which of its target's pairs a part belongs to."""
    wants: Ints
    """`[targets]`: the list that each target wants."""
    pair_start: Ints
    """`[targets + 1]`: first pair of each target."""
    pair_bytes: Ints
    """`[pairs]`"""
    choice: Ints
    """`[pairs]`: index into `sets` of the nearest holders."""
    sets: RankSets
    distance: Ints
    """`[pairs]`: of the nearest holders."""
    line: Ints
    """`[pairs]`: where the target's parts of this choice begin on the line of `turns`."""
    turns: Turns
    places: tuple[Places, Places]

    @cached_property
    def takes_turns(self) -> NDArray[np.bool_]:
        """`[pairs]`: whether several sources share the pair's parts."""
        found: NDArray[np.bool_] = (self.distance != SAME_PROCESS) & (self.sets.counts[self.choice] > 1)
        return found

    @cached_property
    def is_cut(self) -> NDArray[np.bool_]:
        """`[targets]`: whether any of its parts may be split between sources."""
        return np.bincount(self.pair_target, self.takes_turns, minlength=len(self.wants)) > 0

    @cached_property
    def pair_target(self) -> Ints:
        """`[pairs]`"""
        return np.repeat(np.arange(len(self.wants)), np.diff(self.pair_start))

    @cached_property
    def pair_source(self) -> Ints:
        """`[pairs]`: the source, unless several take turns."""
        if not len(self.choice):
            return self.choice
        return self.sets.members[self.sets.start[self.choice]]

    def rows(self, target: int) -> slice:
        """The parts that a target wants."""
        return slice(self.start[self.wants[target]], self.start[self.wants[target] + 1])

    def pieces(self, target: int) -> Pieces:
        """What a target receives, in its order."""
        rows = self.rows(target)
        parts, num_bytes = self.parts.take(np.arange(rows.start, rows.stop)), self.num_bytes[rows]
        pair = self.pair_start[target] + self.pair_in_list[rows]
        if not self.is_cut[target]:
            return Pieces(parts, self.pair_source[pair], num_bytes)
        alone, shared = np.flatnonzero(~self.takes_turns[pair]), np.flatnonzero(self.takes_turns[pair])
        cut, origin, giver = self._cut(parts.take(shared), num_bytes[shared], pair[shared])
        origin = np.concatenate((alone, shared[origin]))
        order = np.argsort(origin, kind="stable")
        boxes = parts.take(alone).joined(cut).take(order)
        source = np.concatenate((self.pair_source[pair[alone]], giver))[order]
        element_bytes = num_bytes // parts.numel
        return Pieces(boxes, source, boxes.numel * element_bytes[origin[order]])

    def _cut(self, parts: BoxTable, num_bytes: Ints, pair: Ints) -> tuple[BoxTable, Ints, Ints]:
        """Splits parts between the sources that take turns: (pieces, part of each, source of each)."""
        choice = self.choice[pair]
        by_choice = np.argsort(choice, kind="stable")
        begins = np.cumsum(num_bytes[by_choice]) - num_bytes[by_choice]
        ordered = choice[by_choice]
        before = np.empty_like(begins)
        before[by_choice] = begins - begins[np.searchsorted(ordered, ordered)]
        return self.turns.cut(parts, num_bytes, self.line[pair] + before)

    def routes(self) -> Routes:
        """Bytes between each target and each of its sources."""
        alone = ~self.takes_turns
        targets, sources = [self.pair_target[alone]], [self.pair_source[alone]]
        sums = [self.pair_bytes[alone]]
        for target in np.flatnonzero(self.is_cut).tolist():
            rows = self.rows(target)
            pair = self.pair_start[target] + self.pair_in_list[rows]
            shared = np.flatnonzero(self.takes_turns[pair])
            parts, num_bytes = self.parts.take(rows.start + shared), self.num_bytes[rows][shared]
            cut, origin, giver = self._cut(parts, num_bytes, pair[shared])
            received = np.bincount(giver, cut.numel * (num_bytes // parts.numel)[origin]).astype(np.int64)
            sources.append(np.flatnonzero(received))
            targets.append(np.full(len(sources[-1]), target))
            sums.append(received[sources[-1]])
        return Routes.of(np.concatenate(targets), np.concatenate(sources), np.concatenate(sums), self.places)


def match(sides: Sides, *, shift: int = 0) -> Matching:
    """Assigns a source to every part of every wanted box.

    `shift`: chooses, among the holders of a piece, the one this many places after the holder whose turn it is.
    """
    wanted, wants = sides.wanted, sides.wants
    first, which = distinct(wanted)
    few = wanted.take(first)
    held_as = BoxTable(np.arange(len(few)), sides.held_name[few.name], few.offset, few.size)
    atoms = _fine_enough(find_atoms(held_as, sides.held, sides.tensors), sides.element_bytes[few.name])
    per_box = np.bincount(atoms.boxes.rank, minlength=len(few))
    counts = per_box[which]
    rows = np.repeat(np.arange(len(wanted)), counts)
    atom = (np.cumsum(per_box) - per_box)[which[rows]] + ragged(counts)
    parts = BoxTable(wanted.rank[rows], wanted.name[rows], atoms.boxes.offset[atom], atoms.boxes.size[atom])
    num_bytes = parts.numel * sides.element_bytes[parts.name]

    num_lists = int(wants.max(initial=-1)) + 1
    key, held_by = np.unique(parts.rank * len(atoms.sets) + atoms.holders[atom], return_inverse=True)
    held_by, key_list = held_by.reshape(-1), key // max(len(atoms.sets), 1)
    list_start = np.searchsorted(key_list, np.arange(num_lists + 1))
    pairs_of = np.diff(list_start)[wants] if num_lists else wants
    pair_target = np.repeat(np.arange(len(wants)), pairs_of)
    pair_key = list_start[wants][pair_target] + ragged(pairs_of)
    pair_bytes = np.bincount(held_by, num_bytes, minlength=len(key)).astype(np.int64)[pair_key]
    holders = key[pair_key] - key_list[pair_key] * len(atoms.sets)
    choice, sets, distance = _nearest(holders, atoms.sets, pair_target, sides.places)

    go = np.flatnonzero(distance != SAME_PROCESS)
    line = np.zeros(len(choice), np.int64)
    stretch, at = np.unique(choice[go] * len(wants) + pair_target[go], return_inverse=True)
    lengths = np.bincount(at.reshape(-1), pair_bytes[go], minlength=len(stretch)).astype(np.int64)
    line[go] = (np.cumsum(lengths) - lengths)[at.reshape(-1)]
    of_set = stretch // max(len(wants), 1)
    return Matching(
        parts=parts,
        num_bytes=num_bytes,
        start=np.searchsorted(parts.rank, np.arange(num_lists + 1)),
        pair_in_list=held_by - list_start[parts.rank],
        wants=wants,
        pair_start=np.concatenate(([0], np.cumsum(pairs_of))),
        pair_bytes=pair_bytes,
        choice=choice,
        sets=sets,
        distance=distance,
        line=line,
        turns=Turns.of(
            np.bincount(of_set, lengths, minlength=len(sets)).astype(np.int64),
            np.bincount(of_set, minlength=len(sets)),
            sets,
            len(sides.places[0].node),
            shift=shift,
        ),
        places=sides.places,
    )


def _fine_enough(atoms: Atoms, element_bytes: Ints) -> Atoms:
    """Splits atoms whose rows are too long for replicas to share evenly."""
    if not len(atoms.boxes):
        return atoms
    limit = np.maximum(PIECE_BYTES // element_bytes[atoms.boxes.rank], 1)
    _, row = first_axis(atoms.boxes)
    boxes, origin = cut_rows(atoms.boxes, np.where(row > limit, limit, np.iinfo(np.int64).max))
    return Atoms(boxes, atoms.holders[origin], atoms.sets)


def _nearest(holders: Ints, sets: RankSets, target: Ints, places: tuple[Places, Places]) -> tuple[Ints, RankSets, Ints]:
    """For each pair, the sources of its set that are nearest to its target.

    Args:
        holders: `[N]`: index into `sets`.
        sets: sets of source ranks.
        target: `[N]`: target of each pair.
        places: places of the sources, places of the targets.

    Returns:
        `[N]` index into the returned sets, these sets, and `[N]` their distance.
    """
    source, wanting = places
    reachable = np.isin(wanting.node, source.node) | np.isin(wanting.process, source.process)
    # Every source is equally far from all targets on nodes without sources: these share one result.
    spot = np.where(reachable, np.arange(len(reachable)) + 1, 0)[target]
    key = holders * (len(reachable) + 1) + spot
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    if not len(first):
        return which.reshape(-1), sets, which.reshape(-1)
    asked = sets.take(holders[first])
    far = source.distance(asked.members, wanting, np.repeat(target[first], asked.counts))
    least = np.minimum.reduceat(far, asked.start[:-1])
    kept = far == np.repeat(least, asked.counts)
    ends = np.concatenate(([0], np.cumsum(kept)))[asked.start]
    few, again = RankSets(ends, asked.members[kept]).distinct()
    which = which.reshape(-1)
    return again[which], few, least[which]
