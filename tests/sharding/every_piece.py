"""Plans made of the pieces of all targets at once, without anything shared between equal ones: memory grows with
targets times pieces. What `plan_reshard` gives must be equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsdk.interfaces import DTYPE_BYTES, WeightLayout
from rlsdk.sharding.plan.balance import Turns
from rlsdk.sharding.plan.box_table import BoxTable, Ints, cut_rows, distinct, first_axis, pack, ragged
from rlsdk.sharding.plan.holders import (
    SAME_PROCESS,
    Atoms,
    Places,
    RankSets,
    SourceTensors,
    distinct_tensors,
    find_atoms,
)
from rlsdk.sharding.plan.matching import PIECE_BYTES
from rlsdk.sharding.plan.packed_plan import Columns, PackedBuckets
from rlsdk.sharding.plan.planner import choose_transport, wire_tensors
from rlsdk.sharding.transports.in_process import InProcessTransport
from rlsdk.sharding.transports.transport import Transport


@dataclass(frozen=True)
class EveryPiece:
    """What is compared."""

    parts: list[PackedBuckets]
    load: dict[int, int]


def plan_every_piece(
    source: Sequence[WeightLayout],
    target: Sequence[WeightLayout],
    bucket_bytes: int,
    transports: Sequence[type[Transport]],
) -> EveryPiece:
    held = SourceTensors(source)
    wire = wire_tensors(held, distinct_tensors(target))
    widths = np.array([DTYPE_BYTES[meta.dtype] for meta in wire.values()], np.int64)
    boxes, giver, distance = pieces_of(source, target, held, wire, widths)
    num_bytes = boxes.numel * widths[boxes.name]
    away = distance != SAME_PROCESS
    load = np.bincount(giver[away], num_bytes[away], minlength=len(source)).astype(np.int64)
    ways = [
        choose_transport(source[s], target[t], transports)
        for s, t in zip(giver.tolist(), boxes.rank.tolist(), strict=True)
    ]
    ways = in_place(ways, giver, boxes.rank, source, target, transports)
    rings = readers(boxes, giver, ways, target, transports)
    parts = []
    for at in range(len(target)):
        mine = np.flatnonzero(boxes.rank == at)
        columns = Columns(
            giver[mine].astype(np.int32), boxes.name[mine].astype(np.int32), boxes.offset[mine], boxes.size[mine]
        )
        by_source = {int(giver[row]): ways[row] for row in mine.tolist()}
        parts.append(PackedBuckets(at, columns, tuple(wire.values()), by_source, bucket_bytes, rings.get(at, {})))
    return EveryPiece(parts, dict(enumerate(load.tolist())))


def pieces_of(source, target, held, wire, widths):  # type: ignore[no-untyped-def]
    """(boxes by target, in the order in which each receives them; source of each; distance of each)."""
    num_dims = max((len(meta.shape) for meta in held.tensors.values()), default=1) or 1
    wanted = in_order(pack(target, wire, num_dims))
    position = {name: at for at, name in enumerate(held.tensors)}
    held_name = np.array([position[held.resolve(name)] for name in wire], np.int64)
    places = Places.of(source, target)
    first, which = distinct(wanted)
    few = wanted.take(first)
    held_as = BoxTable(np.arange(len(few)), held_name[few.name], few.offset, few.size)
    atoms = find_atoms(held_as, pack(source, held.tensors, num_dims), tuple(held.tensors.values()))
    atoms = fine_enough(atoms, widths[few.name])
    per_box = np.bincount(atoms.boxes.rank, minlength=len(few))
    rows = np.repeat(np.arange(len(wanted)), per_box[which])
    atom = (np.cumsum(per_box) - per_box)[which[rows]] + ragged(per_box[which])
    taken = BoxTable(wanted.rank[rows], wanted.name[rows], atoms.boxes.offset[atom], atoms.boxes.size[atom])
    choice, sets, distance = nearest(atoms.holders[atom], atoms.sets, taken.rank, places)
    stay, go = np.flatnonzero(distance == SAME_PROCESS), np.flatnonzero(distance != SAME_PROCESS)
    moved, origin, giver = take_turns(taken.take(go), widths[taken.name[go]], choice[go], sets, len(source))
    origin = np.concatenate((stay, go[origin]))
    order = np.argsort(origin, kind="stable")
    boxes = taken.take(stay).joined(moved).take(order)
    return boxes, np.concatenate((sets.members[sets.start[choice[stay]]], giver))[order], distance[origin][order]


def in_order(table: BoxTable) -> BoxTable:
    if not len(table):
        return table
    key = table.rank * (int(table.name.max()) + 1) + table.name
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    dims = range(table.offset.shape[1])
    sizes, offsets = [table.size[:, d] for d in dims], [table.offset[:, d] for d in dims]
    return table.take(np.lexsort((*reversed(sizes), *reversed(offsets), first[which.reshape(-1)])))


def fine_enough(atoms: Atoms, element_bytes: Ints) -> Atoms:
    if not len(atoms.boxes):
        return atoms
    limit = np.maximum(PIECE_BYTES // element_bytes[atoms.boxes.rank], 1)
    _, row = first_axis(atoms.boxes)
    boxes, origin = cut_rows(atoms.boxes, np.where(row > limit, limit, np.iinfo(np.int64).max))
    return Atoms(boxes, atoms.holders[origin], atoms.sets)


def nearest(holders: Ints, sets: RankSets, target: Ints, places: tuple[Places, Places]) -> tuple[Ints, RankSets, Ints]:
    source, wanting = places
    reachable = np.isin(wanting.node, source.node) | np.isin(wanting.process, source.process)
    spot = np.where(reachable, np.arange(len(reachable)) + 1, 0)[target]
    _, first, which = np.unique(holders * (len(reachable) + 1) + spot, return_index=True, return_inverse=True)
    if not len(first):
        return which.reshape(-1), sets, which.reshape(-1)
    asked = sets.take(holders[first])
    far = source.distance(asked.members, wanting, np.repeat(target[first], asked.counts))
    least = np.minimum.reduceat(far, asked.start[:-1])
    kept = far == np.repeat(least, asked.counts)
    ends = np.concatenate(([0], np.cumsum(kept)))[asked.start]
    few, again = RankSets(ends, asked.members[kept]).distinct()
    return again[which.reshape(-1)], few, least[which.reshape(-1)]


def take_turns(
    boxes: BoxTable, element_bytes: Ints, which: Ints, sets: RankSets, num_ranks: int
) -> tuple[BoxTable, Ints, Ints]:
    """Concatenates the boxes of each set on a line, and cuts it where turns end."""
    sizes = boxes.numel * element_bytes
    totals = np.bincount(which, sizes, minlength=len(sets)).astype(np.int64)
    by_set = np.argsort(which, kind="stable")
    line_end = np.cumsum(sizes[by_set])
    line_start = line_end - sizes[by_set]
    pairs = np.unique(which * (int(boxes.rank.max(initial=0)) + 1) + boxes.rank)
    num_targets = np.bincount(pairs // (int(boxes.rank.max(initial=0)) + 1), minlength=len(sets))
    turns = Turns.of(totals, num_targets, sets, num_ranks)
    bounds, owner = turns.bounds, turns.owner
    first = np.searchsorted(bounds, line_start, side="right") - 1
    count = np.searchsorted(bounds, line_end, side="left") - first
    at, turn = np.repeat(np.arange(len(boxes)), count), np.repeat(first, count) + ragged(count)
    axis, row = first_axis(boxes)
    axis, rows, row_bytes = (
        values[by_set][at] for values in (axis, boxes.size[np.arange(len(boxes)), axis], row * element_bytes)
    )
    begin, end = (
        np.clip((bounds[edge] - line_start[at] + row_bytes // 2) // row_bytes, 0, rows) for edge in (turn, turn + 1)
    )
    kept = np.flatnonzero(end > begin)
    origin = by_set[at[kept]]
    order = np.lexsort((begin[kept], origin))
    kept, origin = kept[order], origin[order]
    pieces = boxes.take(origin)
    where = (np.arange(len(kept)), axis[kept])
    pieces.offset[where] += begin[kept]
    pieces.size[where] = end[kept] - begin[kept]
    return pieces, origin, owner[turn[kept]]


def in_place(ways, giver, taker, source, target, transports):  # type: ignore[no-untyped-def]
    """What a replica's process fetches for a worker is read in place where the source is in that process."""
    reach = {transport.name: transport.reaches_workers() for transport in transports}
    fetched = {
        t for t, way in zip(taker.tolist(), ways, strict=True) if target[t].worker is not None and not reach[way]
    }
    return [
        InProcessTransport.name if t in fetched and source[s].process == target[t].host else way
        for s, t, way in zip(giver.tolist(), taker.tolist(), ways, strict=True)
    ]


def readers(boxes, giver, ways, target, transports):  # type: ignore[no-untyped-def]
    """By target and source, the targets that take the same pieces from it at the same places of the same whole."""
    rings = {transport.name for transport in transports if transport.shares_slots}
    processes = Counter(layout.process for layout in target)
    groups: dict[object, list[int]] = {}
    for at in range(len(target)):
        mine = np.flatnonzero(boxes.rank == at).tolist()
        whole = tuple((int(boxes.name[r]), *boxes.offset[r].tolist(), *boxes.size[r].tolist()) for r in mine)
        by_source: dict[int, list[int]] = {}
        for place, row in enumerate(mine):
            if ways[row] in rings and processes[target[at].process] == 1:
                by_source.setdefault(int(giver[row]), []).append(place)
        for source, places in by_source.items():
            groups.setdefault((source, ways[mine[places[0]]], tuple(places), whole), []).append(at)
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for key, takers in groups.items():
        for taker in takers if len(takers) > 1 else ():
            found.setdefault(taker, {})[key[0]] = tuple(takers)  # type: ignore[index]
    return found
