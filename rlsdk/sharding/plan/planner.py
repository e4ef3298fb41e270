"""The reshard planner: from source and target layouts to the transfers between them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from rlsdk.sharding.plan.box_table import BoxTable, Ints, overlaps, ragged
from rlsdk.sharding.plan.boxes import covered_elements
from rlsdk.sharding.plan.holders import SourceTensors, distinct_tensors, tied_to
from rlsdk.sharding.plan.matching import Sides, match
from rlsdk.sharding.plan.packed_plan import PackedParts
from rlsdk.sharding.plan.readers import shared_rings
from rlsdk.sharding.plan.relays import plan_relays, predict_seconds, relayed_load
from rlsdk.sharding.plan.routes import Routes
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
    plans. Targets of equal boxes share one table of their parts; the pieces of a target and its buckets are created on
    access.

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
    matching = match(sides)
    routes = matching.routes()
    load = routes.moved_by_source(len(source))
    relays = plan_relays(target, sides, routes)
    names, chosen = choose_transports(routes, source, target, transports)
    shared = shared_rings(matching, routes, np.array([t.shares_slots for t in transports], bool), chosen, target)
    return ReshardPlan(
        tensors=wire,
        parts=PackedParts(matching, routes, chosen, names, tuple(wire.values()), bucket_bytes, shared),
        num_bytes=int(routes.num_bytes.sum()),
        lower_bound_bytes=_lacking(sides),
        moved_bytes=int(load.sum()),
        bucket_bytes=bucket_bytes,
        source_load=dict(enumerate(load.tolist())),
        relays=relays,
        relayed_load=dict(enumerate(relayed_load(routes, relays, len(source)).tolist())),
        predicted_s=predict_seconds(routes, relays, target, len(source), bucket_bytes),
    )


def wire_dtype(held: str, wanted: str) -> str:
    """Dtype on the wire: the wanted dtype, or the held one if the wanted dtype is wider; widening at the target is
    exact and saves bytes."""
    return held if DTYPE_BYTES[wanted] > DTYPE_BYTES[held] else wanted


def lower_bound_bytes(source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> int:
    """Bytes that targets lack in their own process, counted without planning."""
    held = SourceTensors(source)
    return _lacking(Sides.of(source, target, held, wire_tensors(held, distinct_tensors(target))))


def _lacking(sides: Sides) -> int:
    """The wanted bytes that no source in the target's own process holds."""
    givers, takers = sides.places
    wanted_bytes = sides.wanted.numel * sides.element_bytes[sides.wanted.name]
    of_list = np.bincount(sides.wanted.rank, wanted_bytes, minlength=int(sides.wants.max(initial=-1)) + 1)
    total = int(of_list.astype(np.int64)[sides.wants].sum())
    num_ranks = np.bincount(givers.process, minlength=int(takers.process.max(initial=0)) + 1)
    # Boxes of one rank do not overlap: what it covers is the sum of its intersections.
    one, several = num_ranks[takers.process] == 1, num_ranks[takers.process] > 1
    return total - _covered_by_one(sides, np.flatnonzero(one)) - _covered_by_several(sides, np.flatnonzero(several))


def _covered_by_one(sides: Sides, target: Ints) -> int:
    """The wanted bytes of these targets that the one source in their process holds."""
    givers, takers = sides.places
    if not len(target):
        return 0
    source = np.argsort(givers.process)[np.searchsorted(np.sort(givers.process), takers.process[target])]
    num_lists, num_names = int(sides.wants.max()) + 1, len(sides.tensors)
    couples, count = np.unique(source * num_lists + sides.wants[target], return_counts=True)
    here = sides.held.take(np.isin(sides.held.rank, source))
    by_rank = np.argsort(here.rank, kind="stable")
    first, last = (np.searchsorted(here.rank[by_rank], couples // num_lists, side=side) for side in ("left", "right"))
    couple = np.repeat(np.arange(len(couples)), last - first)
    rows = by_rank[first[couple] + ragged(last - first)]
    held, wanted = here.take(rows), sides.wanted
    held = replace(held, name=couples[couple] % num_lists * num_names + held.name)
    wanted = replace(wanted, name=wanted.rank * num_names + sides.held_name[wanted.name])
    total = 0
    for left, right, shared in overlaps(held, wanted):
        width = sides.element_bytes[sides.wanted.name[right]]
        total += int((shared.numel * width * count[couple[left]]).sum())
    return total


def _covered_by_several(sides: Sides, target: Ints) -> int:
    """The wanted bytes of these targets that any of several sources in their process holds."""
    givers, takers = sides.places
    if not len(target):
        return 0
    here: dict[tuple[int, int], list[Box]] = defaultdict(list)
    held = sides.held.take(np.isin(givers.process[sides.held.rank], takers.process[target]))
    for process, name, box in zip(givers.process[held.rank].tolist(), held.name.tolist(), _boxes(held), strict=True):
        here[process, name].append(box)
    total = 0
    for at in target.tolist():
        mine = sides.wanted.take(sides.wanted.rank == sides.wants[at])
        process = int(takers.process[at])
        for name, box in zip(mine.name.tolist(), _boxes(mine), strict=True):
            covered = covered_elements(box, here.get((process, int(sides.held_name[name])), ()))
            total += covered * int(sides.element_bytes[name])
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
    routes: Routes,
    source: Sequence[WeightLayout],
    target: Sequence[WeightLayout],
    transports: Sequence[type[Transport]],
) -> tuple[tuple[str, ...], Ints]:
    """For each pair of ranks, the first transport that works: (names, index of the name for each route).

    Computed once for each kind of pair: their distance (same process, device, node, or none of these), and the kind of
    device of each.
    """
    names = tuple(transport.name for transport in transports)
    kinds: dict[str, int] = {}
    of_kind = [
        np.array([kinds.setdefault(layout.device.partition(":")[0], len(kinds)) for layout in side], np.int64)
        for side in (source, target)
    ]
    stand = routes.distance
    for kind, ranks in zip(of_kind, (routes.source, routes.target), strict=True):
        stand = stand * len(kinds) + kind[ranks]
    _, first, which = np.unique(stand, return_index=True, return_inverse=True)
    chosen = [
        names.index(choose_transport(source[routes.source[at]], target[routes.target[at]], transports))
        for at in first.tolist()
    ]
    by_route = np.array(chosen, np.int64)[which.reshape(-1)]
    return names, _in_place_for_hosts(routes, by_route, source, target, transports)


def _in_place_for_hosts(
    routes: Routes,
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
    fetched = np.zeros(len(target), bool)
    fetched[routes.target[workers[routes.target] & unreached[chosen]]] = True
    numbers = {layout.process: at for at, layout in enumerate(source)}
    process = np.array([numbers[layout.process] for layout in source], np.int64)
    host = np.array([numbers.get(layout.host or "", -1) for layout in target], np.int64)
    here = fetched[routes.target] & (process[routes.source] == host[routes.target])
    return np.where(here, names.index(InProcessTransport.name), chosen)


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
