"""The reshard planner: from source and target layouts to the transfers between them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    ConfigError,
    LayoutError,
    ReshardPlan,
    TensorMeta,
    WeightLayout,
)
from rlsdk.sharding.plan.balance import take_turns
from rlsdk.sharding.plan.box_table import BoxTable, Ints, cut_rows, distinct, first_axis, pack, ragged
from rlsdk.sharding.plan.boxes import covered_elements
from rlsdk.sharding.plan.holders import (
    SAME_PROCESS,
    Atoms,
    Places,
    RankSets,
    SourceTensors,
    distinct_tensors,
    find_atoms,
    tied_to,
)
from rlsdk.sharding.plan.packed_plan import PIECE_BYTES, PackedParts, Pieces
from rlsdk.sharding.plan.readers import shared_rings
from rlsdk.sharding.plan.relays import plan_relays, predict_seconds, relayed_load
from rlsdk.sharding.plan.scales import check_scales
from rlsdk.sharding.transports.in_process import InProcessTransport
from rlsdk.sharding.transports.transport import Transport


def plan_reshard(
    source: Sequence[WeightLayout],
    target: Sequence[WeightLayout],
    *,
    bucket_bytes: int,
    transports: Sequence[type[Transport]],
) -> ReshardPlan:
    """Plans the transfers that bring every target the boxes it wants: each byte once, from the nearest holder.

    Equally near holders take turns, so that the load is even, as far as their boxes allow. Equal layouts give equal
    plans. Plans are computed and stored as columns: buckets are created on access.

    Args:
        source: one layout per training rank.
        target: one layout per place that weights are delivered to.
        bucket_bytes: bound on the bytes that one target receives at once; a larger box is split.
        transports: in order of preference; for each pair the first one that works is chosen.

    Raises:
        LayoutError: no source holds a wanted box, shapes or kinds of dtype differ, or a source holds a tensor that no
            target wants.
    """
    if bucket_bytes < max(DTYPE_BYTES.values()):
        raise ConfigError(f"bucket_bytes is {bucket_bytes}: expected at least {max(DTYPE_BYTES.values())}")
    held = SourceTensors(source)
    wanted = distinct_tensors(target)
    wire = wire_tensors(held, wanted)
    check_scales(target, wanted)
    _check_all_wanted(held, wire, target)
    sides = Sides.of(source, target, held, wire)
    pieces = match(sides)
    load = pieces.moved_by_source(len(source))
    relays = plan_relays(target, sides.wanted, pieces)
    names, chosen = choose_transports(pieces, source, target, transports)
    shared = shared_rings(pieces, np.array([t.shares_slots for t in transports], bool)[chosen], chosen, target)
    return ReshardPlan(
        tensors=wire,
        parts=PackedParts.of(pieces, chosen, names, tuple(wire.values()), len(target), bucket_bytes, shared),
        num_bytes=int(pieces.num_bytes.sum()),
        lower_bound_bytes=_lacking(sides, source, target),
        moved_bytes=int(load.sum()),
        bucket_bytes=bucket_bytes,
        source_load=dict(enumerate(load.tolist())),
        relays=relays,
        relayed_load=dict(enumerate(relayed_load(pieces, relays, len(source)).tolist())),
        predicted_s=predict_seconds(pieces, relays, target, len(source), bucket_bytes),
    )


def wire_dtype(held: str, wanted: str) -> str:
    """Dtype on the wire: the wanted dtype, or the held one if the wanted dtype is wider; widening at the target is
    exact and saves bytes."""
    return held if DTYPE_BYTES[wanted] > DTYPE_BYTES[held] else wanted


@dataclass(frozen=True)
class Sides:
    """Both sides as columns."""

    held: BoxTable
    """Boxes of the sources; `name` is an index into `tensors`."""
    wanted: BoxTable
    """Boxes of the targets, in the order in which each receives them; `name` is an index into `wire`."""
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
        return cls(
            held=pack(source, held.tensors, num_dims),
            wanted=_in_order(pack(target, wire, num_dims)),
            held_name=np.array([position[held.resolve(name)] for name in wire], np.int64),
            tensors=tuple(held.tensors.values()),
            element_bytes=np.array([DTYPE_BYTES[meta.dtype] for meta in wire.values()], np.int64),
            places=Places.of(source, target),
        )


def _in_order(table: BoxTable) -> BoxTable:
    """Sorted by target, then by the position of the name in its layout, then by box."""
    if not len(table):
        return table
    key = table.rank * (int(table.name.max()) + 1) + table.name
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    dims = range(table.offset.shape[1])
    sizes, offsets = [table.size[:, d] for d in dims], [table.offset[:, d] for d in dims]
    order = np.lexsort((*reversed(sizes), *reversed(offsets), first[which.reshape(-1)]))
    return table.take(order)


def match(sides: Sides, *, shift: int = 0) -> Pieces:
    """Assigns a source to every part of every wanted box. Pieces are ordered by target, then by the target's order.

    `shift`: chooses, among the holders of a piece, the one this many places after the holder whose turn it is.
    """
    wanted = sides.wanted
    first, which = distinct(wanted)
    few = wanted.take(first)
    held_as = BoxTable(np.arange(len(few)), sides.held_name[few.name], few.offset, few.size)
    atoms = _fine_enough(find_atoms(held_as, sides.held, sides.tensors), sides.element_bytes[few.name])
    per_box = np.bincount(atoms.boxes.rank, minlength=len(few))
    counts = per_box[which]
    rows = np.repeat(np.arange(len(wanted)), counts)
    atom = (np.cumsum(per_box) - per_box)[which[rows]] + ragged(counts)
    taken = BoxTable(wanted.rank[rows], wanted.name[rows], atoms.boxes.offset[atom], atoms.boxes.size[atom])
    choice, sets, distance = _nearest(atoms.holders[atom], atoms.sets, taken.rank, sides.places)
    element_bytes = sides.element_bytes[taken.name]
    at_home = distance == SAME_PROCESS
    stay, go = np.flatnonzero(at_home), np.flatnonzero(~at_home)
    moved, origin, giver = take_turns(
        taken.take(go), element_bytes[go], choice[go], sets, len(sides.places[0].node), shift=shift
    )
    origin = np.concatenate((stay, go[origin]))
    order = np.argsort(origin, kind="stable")
    return Pieces(
        boxes=taken.take(stay).joined(moved).take(order),
        source=np.concatenate((sets.members[sets.start[choice[stay]]], giver))[order],
        element_bytes=element_bytes[origin][order],
        distance=distance[origin][order],
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
    """For each piece, the sources that hold it and are nearest to its target.

    Args:
        holders: `[N]`: index into `sets` of the holders of each piece.
        sets: sets of source ranks.
        target: `[N]`: target of each piece.
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


def lower_bound_bytes(source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> int:
    """Bytes that targets lack in their own process, counted without planning."""
    held = SourceTensors(source)
    return _lacking(Sides.of(source, target, held, wire_tensors(held, distinct_tensors(target))), source, target)


def _lacking(sides: Sides, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> int:
    """The wanted bytes that no source in the target's own process holds."""
    wanted = sides.wanted
    total = int((wanted.numel * sides.element_bytes[wanted.name]).sum())
    sources = {layout.process for layout in source}
    shared = [at for at, layout in enumerate(target) if layout.process in sources]
    if not shared:
        return total
    here: dict[tuple[int, int], list[Box]] = defaultdict(list)
    givers, takers = sides.places
    held = sides.held.take(np.isin(givers.process[sides.held.rank], takers.process[shared]))
    for process, name, box in zip(givers.process[held.rank].tolist(), held.name.tolist(), _boxes(held), strict=True):
        here[process, name].append(box)
    mine = wanted.take(np.isin(wanted.rank, shared))
    for process, name, box in zip(takers.process[mine.rank].tolist(), mine.name.tolist(), _boxes(mine), strict=True):
        covered = covered_elements(box, here.get((process, int(sides.held_name[name])), ()))
        total -= covered * int(sides.element_bytes[name])
    return total


def _boxes(table: BoxTable) -> list[Box]:
    return [Box(tuple(o), tuple(s)) for o, s in zip(table.offset.tolist(), table.size.tolist(), strict=True)]


def _check_all_wanted(held: SourceTensors, wire: Mapping[str, TensorMeta], target: Sequence[WeightLayout]) -> None:
    wanted = set(map(held.resolve, wire))
    tied = tied_to(target)
    for name in sorted(held.tensors.keys() - wanted):
        if name in tied:
            raise LayoutError(
                f"the source trains {name!r} by itself, but the target serves it tied to {tied[name]!r}: "
                "set tie_word_embeddings to the same value on both sides"
            )
        raise LayoutError(
            f"the source trains {name!r}, which no target asks for: it would be trained and never served. The rollout "
            "backend's layout() must list every tensor of the model"
        )


def wire_tensors(held: SourceTensors, wanted: Sequence[TensorMeta]) -> dict[str, TensorMeta]:
    """Every wanted tensor (of `distinct_tensors`) with its dtype on the wire."""
    wire: dict[str, TensorMeta] = {}
    for meta in wanted:
        travels = _wire_tensor(held.tensors[held.resolve(meta.name)], meta)
        if wire.setdefault(meta.name, travels) != travels:
            raise LayoutError(
                f"{meta.name!r}: targets want different dtypes, {wire[meta.name].dtype} and {travels.dtype}"
            )
    return wire


def _wire_tensor(held: TensorMeta, wanted: TensorMeta) -> TensorMeta:
    if held.shape != wanted.shape:
        raise LayoutError(
            f"{wanted.name!r}: the source holds shape {list(held.shape)}, the target wants {list(wanted.shape)}"
        )
    if ("float" in held.dtype) != ("float" in wanted.dtype):
        raise LayoutError(
            f"{wanted.name!r}: the source holds {held.dtype}, the target wants {wanted.dtype}; a cast would change "
            "the values: the engine must quantize by itself and ask for what it takes"
        )
    if held.scales is not None or (wanted.scales is not None and held.dtype.startswith("float8")):
        raise LayoutError(
            f"{wanted.name!r}: the source holds {held.dtype}, and weights are quantized where they are served, of "
            "values in float32, bfloat16 or float16: train in one of these"
        )
    if wanted.scales is not None:
        return replace(wanted, dtype=wire_dtype(held.dtype, wanted.scales.taken_as), scales=None)
    if wanted.dtype.startswith("float8") and held.dtype != wanted.dtype:
        raise LayoutError(
            f"{wanted.name!r}: the source holds {held.dtype}, the target wants {wanted.dtype}; a cast without scales "
            "loses most of the values' precision. Serve it in bfloat16 (model.dtype), or with a rollout backend whose "
            "layout names its scales (TensorMeta.scales) and that quantizes what arrives"
        )
    dtype = wire_dtype(held.dtype, wanted.dtype)
    return wanted if dtype == wanted.dtype else replace(wanted, dtype=dtype)


def choose_transports(
    pieces: Pieces,
    source: Sequence[WeightLayout],
    target: Sequence[WeightLayout],
    transports: Sequence[type[Transport]],
) -> tuple[tuple[str, ...], Ints]:
    """For each pair of ranks, the first transport that works: (names, index of the name for each piece).

    Computed once for each kind of pair: their distance (same process, device, node, or none of these), and the kind of
    device of each.
    """
    names = tuple(transport.name for transport in transports)
    kinds: dict[str, int] = {}
    of_kind = [
        np.array([kinds.setdefault(layout.device.partition(":")[0], len(kinds)) for layout in side], np.int64)
        for side in (source, target)
    ]
    stand = pieces.distance
    for kind, ranks in zip(of_kind, (pieces.source, pieces.boxes.rank), strict=True):
        stand = stand * len(kinds) + kind[ranks]
    _, first, which = np.unique(stand, return_index=True, return_inverse=True)
    chosen = [
        names.index(choose_transport(source[pieces.source[at]], target[pieces.boxes.rank[at]], transports))
        for at in first.tolist()
    ]
    by_piece = np.array(chosen, np.int64)[which.reshape(-1)]
    return names, _in_place_for_hosts(pieces, by_piece, source, target, transports)


def _in_place_for_hosts(
    pieces: Pieces,
    chosen: Ints,
    source: Sequence[WeightLayout],
    target: Sequence[WeightLayout],
    transports: Sequence[type[Transport]],
) -> Ints:
    """The chosen transports, where a source that is in the process that fetches is read in place: the replica's process
    fetches everything of a worker that some transport does not reach."""
    names = [transport.name for transport in transports]
    workers = np.array([layout.worker is not None for layout in target], bool)
    if not workers.any() or InProcessTransport.name not in names:
        return chosen
    unreached = ~np.array([transport.reaches_workers() for transport in transports], bool)
    for rank in np.unique(pieces.boxes.rank[workers[pieces.boxes.rank] & unreached[chosen]]).tolist():
        here = [at for at, layout in enumerate(source) if layout.process == target[rank].host]
        chosen[(pieces.boxes.rank == rank) & np.isin(pieces.source, here)] = names.index(InProcessTransport.name)
    return chosen


def choose_transport(source: WeightLayout, target: WeightLayout, transports: Sequence[type[Transport]]) -> str:
    """Name of the first transport that works from `source` to `target`; between two accelerators preferably one that
    never passes through the host."""
    reaching = [transport for transport in transports if transport.reaches(source, target)]
    on_devices = "cpu" not in (source.device, target.device)
    direct = [transport for transport in reaching if on_devices and transport.stays_on_device]
    if reaching:
        return (direct or reaching)[0].name
    raise LayoutError(
        f"no transport reaches from source rank {source.rank} on {source.node} to target rank {target.rank} on "
        f"{target.node}; tried: {[transport.name for transport in transports]}; sharding.transport: auto finds one"
    )
