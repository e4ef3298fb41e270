"""Properties of a plan (bytes, coverage, order), computed piece by piece and independently of the planner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from rlsdk.interfaces import DTYPE_BYTES, Box, Bucket, ReshardPlan, Transfer, WeightLayout
from rlsdk.sharding.transports.in_process import InProcessTransport
from rlsdk.sharding.transports.table import named_transports
from rlsdk.testing.sharding.lab import held_name, wanted_boxes, wire_dtypes
from rlsdk.testing.sharding.layouts import Pair

HERE, ON_DEVICE, ON_NODE, AWAY = range(4)
"""Distance of a source from a target."""


def transfer_bytes(transfer: Transfer) -> int:
    return transfer.box.numel * DTYPE_BYTES[transfer.dtype]


def not_once(plan: ReshardPlan, target: Sequence[WeightLayout]) -> list[str]:
    """Boxes of the target with an element that is not sent exactly once."""
    counts = [
        [(name, box, torch.zeros(box.size, dtype=torch.int32)) for name, box in layout.boxes] for layout in target
    ]
    stray = 0
    for bucket in plan.buckets:
        for transfer in bucket.transfers:
            placed = 0
            for name, box, count in counts[bucket.target]:
                common = box.intersect(transfer.box) if name == transfer.name else None
                if common is not None:
                    count[common.slices(box)] += 1
                    placed += common.numel
            stray += transfer.box.numel - placed
    faults = [f"{stray} elements that nobody wants"] if stray else []
    return faults + [
        f"{name} {box.offset}+{box.size} of target {at}: {int((count != 1).sum())} elements"
        for at, entries in enumerate(counts)
        for name, box, count in entries
        if bool((count != 1).any())
    ]


def distance(pair: Pair, source: int, target: int) -> int:
    """Distance of one rank from another."""
    a, b = pair.source[source], pair.target[target]
    if a.process == b.process:
        return HERE
    if a.node != b.node:
        return AWAY
    return ON_DEVICE if a.device == b.device else ON_NODE


def lacking_bytes(pair: Pair, wire: Mapping[str, str]) -> int:
    """Bytes that targets want and that no source in their own process holds, counted element by element."""
    total = 0
    for at, name, box in wanted_boxes(pair):
        lacks = torch.ones(box.size, dtype=torch.bool)
        for source in range(len(pair.source)):
            for held in boxes_of(pair, source, name) if distance(pair, source, at) == HERE else ():
                if (common := box.intersect(held)) is not None:
                    lacks[common.slices(box)] = False
        total += int(lacks.sum()) * DTYPE_BYTES[wire[name]]
    return total


def boxes_of(pair: Pair, source: int, name: str) -> list[Box]:
    """Boxes of a source rank of the tensor that targets call `name`."""
    layout = pair.source[source]
    own = held_name(name, {meta.name: meta for meta in layout.tensors}, layout.tied)
    return [box for held, box in layout.boxes if held == own]


def holds(pair: Pair, source: int, transfer: Transfer) -> bool:
    return any(box.intersect(transfer.box) == transfer.box for box in boxes_of(pair, source, transfer.name))


def wrong_fields(plan: ReshardPlan, pair: Pair) -> Iterator[str]:
    """False statements of a plan about itself."""
    wire = wire_dtypes(pair.source, pair.target)
    shapes = {meta.name: meta.shape for layout in pair.target for meta in layout.tensors}
    said = {name: (meta.name, meta.shape, meta.dtype) for name, meta in plan.tensors.items()}
    if said != {name: (name, shapes[name], dtype) for name, dtype in wire.items()}:
        yield "tensors: not all that is wanted, in the dtype that travels"
    loads: Counter[int] = Counter()
    for at, part in enumerate(plan.parts):
        for bucket in part:
            if bucket.target != at or not 0 <= bucket.source < len(pair.source):
                yield f"a bucket from {bucket.source} to {bucket.target} among those of target {at}"
                continue
            loads[bucket.source] += bucket.num_bytes if distance(pair, bucket.source, at) != HERE else 0
            yield from wrong_transfers(bucket, pair, wire)
    if {source: load for source, load in plan.source_load.items() if load} != +loads:
        yield f"source_load {dict(plan.source_load)}, it is {dict(loads)}"
    yield from wrong_relays(plan, pair)


def wrong_relays(plan: ReshardPlan, pair: Pair) -> Iterator[str]:
    """False statements of a plan about targets that forward to others."""
    needs = [(sorted(layout.boxes), {meta.name: meta.dtype for meta in layout.tensors}) for layout in pair.target]
    known = range(len(needs))
    for target, parent in plan.relays.items():
        if target not in known or parent not in known:
            yield f"relays: target {parent} forwards to {target}, there are {len(needs)} targets"
        elif needs[target] != needs[parent]:
            yield f"relays: target {parent} forwards to {target}, which has other needs"
        elif pair.target[target].is_apart or pair.target[parent].is_apart:
            yield f"relays: target {parent} forwards to {target}, and one is apart from its replica's process"
        at = parent
        for _ in plan.relays:
            at = plan.relays.get(at, at)
        if at in plan.relays:
            yield f"relays: target {target} receives from none that receives from the sources"
    loads: Counter[int] = Counter()
    for at, part in enumerate(plan.parts):
        for bucket in part if at not in plan.relays else ():
            loads[bucket.source] += bucket.num_bytes if distance(pair, bucket.source, at) != HERE else 0
    said = {source: load for source, load in plan.relayed_load.items() if load}
    if said != +loads and (plan.relays or said):
        yield f"relayed_load {dict(plan.relayed_load)}, it is {dict(loads)}"
    if plan.predicted_s is not None and not 0 <= plan.predicted_s < math.inf:
        yield f"predicted_s {plan.predicted_s}"


def wrong_transfers(bucket: Bucket, pair: Pair, wire: Mapping[str, str]) -> Iterator[str]:
    for transfer in bucket.transfers:
        if transfer.box.numel == 0:
            yield f"an empty transfer of {transfer.name}"
        elif not holds(pair, bucket.source, transfer):
            yield f"source {bucket.source} holds no box with {transfer.name} {transfer.box.offset}+{transfer.box.size}"
        if transfer.dtype != wire[transfer.name]:
            yield f"{transfer.name} as {transfer.dtype}, expected {wire[transfer.name]}"
        if transfer.num_bytes != transfer_bytes(transfer):
            yield f"{transfer.num_bytes} bytes of {transfer.name}, it has {transfer_bytes(transfer)}"
    if bucket.num_bytes != sum(map(transfer_bytes, bucket.transfers)):
        yield f"a bucket of {bucket.num_bytes} bytes, its transfers have {sum(map(transfer_bytes, bucket.transfers))}"
    [transport] = named_transports([bucket.transport])
    source, target = pair.source[bucket.source], pair.target[bucket.target]
    read_by_host = target.host == source.process and bucket.transport == InProcessTransport.name
    if not (transport.reaches(source, target) or read_by_host):
        yield f"{bucket.transport} from {bucket.source} to {bucket.target}, which it does not reach"


def out_of_order(parts: Sequence[Sequence[Bucket]]) -> Iterator[str]:
    """Buckets of each target that are out of order, and names that are not contiguous."""
    for at, part in enumerate(parts):
        places = [(bucket.round, bucket.source) for bucket in part]
        if [number for number, _ in places] != sorted(number for number, _ in places):
            yield f"target {at}: rounds {[number for number, _ in places][:8]}"
        yield from (f"target {at}: {n} buckets of round, source {p}" for p, n in Counter(places).items() if n > 1)
        rounds: dict[str, set[int]] = {}
        for bucket in part:
            names = [transfer.name for transfer in bucket.transfers]
            if len(set(names)) != sum(a != b for a, b in zip(names, ["", *names], strict=False)):
                yield f"target {at}: names come back in a bucket, {names[:6]}"
            for name in names:
                rounds.setdefault(name, set()).add(bucket.round)
        yield from (
            f"target {at}: {name} in rounds {sorted(found)[:8]}"
            for name, found in rounds.items()
            if max(found) - min(found) >= len(found)
        )


def sent_from_afar(plan: ReshardPlan, pair: Pair) -> Iterator[str]:
    for bucket in plan.buckets:
        far = distance(pair, bucket.source, bucket.target)
        near = [source for source in range(len(pair.source)) if distance(pair, source, bucket.target) < far]
        for transfer in bucket.transfers:
            if nearer := [source for source in near if holds(pair, source, transfer)]:
                yield f"{transfer.name} to target {bucket.target} from {bucket.source}; {nearer[0]} is nearer"
