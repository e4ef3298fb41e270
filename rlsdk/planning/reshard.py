"""Summary of the weight transfer, from the plan that a run would execute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlsdk.interfaces import DTYPE_BYTES, Bucket, Forecast, RankContext, ReshardPlan, WeightLayout
from rlsdk.sharding.plan.holders import distinct_tensors
from rlsdk.sharding.plan.packed_plan import PackedBuckets, PackedParts, bytes_by_route
from rlsdk.sharding.plan.planner import plan_reshard
from rlsdk.sharding.plan.relays import INTER_NODE_BYTES_S, INTRA_NODE_BYTES_S
from rlsdk.sharding.transfer.devices import on_physical_device
from rlsdk.sharding.transports.in_process import InProcessTransport
from rlsdk.sharding.transports.table import allowed_transports, named_transports

MAX_BYTES = 200 * 10**9
"""Most bytes that are split into buckets to determine sizes. Targets are similar, so the first ones represent all."""
LINKS_GB_S = {"between nodes": INTER_NODE_BYTES_S / 1e9, "within a node": INTRA_NODE_BYTES_S / 1e9}
"""Link bandwidths in GB/s for `ReshardSummary.predicted_s`."""
BLOCKS = 2
"""Blocks of a source per target: one is read while the other is filled."""


@dataclass(frozen=True, kw_only=True)
class ReshardSummary:
    """Summary of one sync."""

    num_tensors: int
    num_parameters: int
    targets: int
    """Number of targets of weights."""
    workers: int
    """Number of these that are workers of rollout engines and receive their own parts."""
    place_bytes: tuple[int, int]
    """Smallest and largest number of bytes that one target receives."""
    num_bytes: int
    """Bytes that all targets together receive."""
    moved_bytes: int
    """Bytes of these that cross a process boundary."""
    lower_bound_bytes: int
    """Lower bound of the bytes that must cross a process boundary."""
    between_nodes_bytes: int
    by_transport: Mapping[str, int]
    busiest_source_bytes: int
    bucket_bytes: int
    sending_bytes: int
    """Memory of the transfer blocks of the source with the most: two for each of its targets."""
    predicted_s: float | None
    """Seconds of the busiest link of any device at full bandwidth (`ReshardPlan.predicted_s`)."""
    receiving_bytes: int
    """Memory of the transfer blocks of the target with the most: at most two rounds of buckets."""
    quantized_tensors: int = 0
    """Number of tensors that are quantized by targets."""
    quantizing_bytes: int = 0
    """Most bytes of one such tensor that a target keeps until blocks are complete."""


def layouts_of(
    forecast: Forecast, processes: Sequence[str], contexts: Sequence[RankContext]
) -> tuple[WeightLayout, ...]:
    """Layouts of all ranks, each with its process and device."""
    return tuple(
        on_physical_device(_placed(layout, process), ctx.accelerators)
        for layouts, process, ctx in zip(forecast.layouts, processes, contexts, strict=True)
        for layout in layouts
    )


def _placed(layout: WeightLayout, process: str) -> WeightLayout:
    """A layout of a rank, or of a worker of the replica, in this process."""
    return replace(layout, process=process) if not layout.process else replace(layout, host=process)


def plan_move(
    source: Sequence[WeightLayout], target: Sequence[WeightLayout], *, bucket_bytes: int, transport: str = "auto"
) -> ReshardPlan:
    """The plan that a run between these layouts would execute.

    Raises:
        LayoutError: as `summarize`.
    """
    transports = named_transports(allowed_transports(transport))
    return plan_reshard(source, target, bucket_bytes=bucket_bytes, transports=transports)


def summarize(
    source: Sequence[WeightLayout], target: Sequence[WeightLayout], *, bucket_bytes: int, transport: str = "auto"
) -> ReshardSummary:
    """Plans the transfer and summarizes it.

    Raises:
        LayoutError: the two sides do not match, or the chosen transport cannot connect them.
    """
    plan = plan_move(source, target, bucket_bytes=bucket_bytes, transport=transport)
    routes = bytes_by_route(plan)
    by_transport: dict[str, int] = {}
    between = 0
    places = dict.fromkeys(range(len(target)), 0)
    for (giver, taker, transport), num_bytes in routes.items():
        by_transport[transport] = by_transport.get(transport, 0) + num_bytes
        places[taker] += num_bytes
        between += num_bytes * (source[giver].node != target[taker].node)
    sending, receiving = block_bytes(plan)
    quantized = [plan.tensors[meta.name] for meta in distinct_tensors(target) if meta.scales is not None]
    return ReshardSummary(
        num_tensors=len(plan.tensors),
        num_parameters=num_parameters(plan),
        targets=len(target),
        workers=sum(layout.worker is not None for layout in target),
        place_bytes=(min(places.values(), default=0), max(places.values(), default=0)),
        num_bytes=plan.num_bytes,
        moved_bytes=plan.moved_bytes,
        lower_bound_bytes=plan.lower_bound_bytes,
        between_nodes_bytes=between,
        by_transport=by_transport,
        busiest_source_bytes=max(plan.source_load.values(), default=0),
        bucket_bytes=bucket_bytes,
        sending_bytes=sending,
        predicted_s=plan.predicted_s,
        receiving_bytes=receiving,
        quantized_tensors=len(quantized),
        quantizing_bytes=max((math.prod(m.shape) * DTYPE_BYTES[m.dtype] for m in quantized), default=0),
    )


def block_bytes(plan: ReshardPlan) -> tuple[int, int]:
    """(bytes of the source, of the target with the largest need): memory between two processes during a transfer."""
    by_source: dict[int, int] = {}
    most = looked = seen = 0
    known: dict[tuple[int, bytes], Mapping[int, int]] = {}
    for target, part in enumerate(plan.parts):
        if seen > MAX_BYTES:
            break
        same = plan.parts.sharing(target) if isinstance(plan.parts, PackedParts) else None
        if same is None or same not in known:
            seen += plan.num_bytes // len(plan.parts)
            largest = largest_buckets(part)
            if same is not None:
                known[same] = largest
        else:
            largest = known[same]
        looked += 1
        away = [(source, num_bytes) for source, num_bytes in largest.items() if not _is_in_process(part, source)]
        most = max(most, BLOCKS * sum(num_bytes for _, num_bytes in away))
        for source, num_bytes in away:
            by_source[source] = by_source.get(source, 0) + BLOCKS * num_bytes
    return max(by_source.values(), default=0) * len(plan.parts) // max(looked, 1), most


def largest_buckets(part: Sequence[Bucket]) -> Mapping[int, int]:
    """Bytes of the largest bucket of each source."""
    if isinstance(part, PackedBuckets):
        return part.largest_by_source()
    largest: dict[int, int] = {}
    for bucket in part:
        largest[bucket.source] = max(largest.get(bucket.source, 0), bucket.num_bytes)
    return largest


def _is_in_process(part: Sequence[Bucket], source: int) -> bool:
    if isinstance(part, PackedBuckets):
        return part.transports[source] == InProcessTransport.name
    return any(bucket.source == source and bucket.transport == InProcessTransport.name for bucket in part)


def num_parameters(plan: ReshardPlan) -> int:
    """Number of parameters of the model; tied copies count once."""
    return sum(math.prod(meta.shape) for meta in plan.tensors.values())
