"""The move of weights, summed up from the plan that a run would carry out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlsdk.interfaces import DTYPE_BYTES, Bucket, Forecast, RankContext, ReshardPlan, WeightLayout
from rlsdk.sharding.devices import on_physical_device
from rlsdk.sharding.holders import distinct_tensors
from rlsdk.sharding.object_store import ObjectStoreTransport
from rlsdk.sharding.packed_plan import PackedBuckets, bytes_by_route
from rlsdk.sharding.planner import plan_reshard
from rlsdk.sharding.relays import INTER_NODE_BYTES_S, INTRA_NODE_BYTES_S
from rlsdk.sharding.transports import InProcessTransport, allowed_transports, named_transports

MAX_BYTES = 200 * 10**9
"""That are cut into buckets for their size. Targets are much alike: the first of them stand for all."""
LINKS_GB_S = {"between nodes": INTER_NODE_BYTES_S / 1e9, "within a node": INTRA_NODE_BYTES_S / 1e9}
"""That `ReshardSummary.predicted_s` counts with."""
BLOCKS = 2
"""That a source keeps for each target: one is read while the other is filled."""


@dataclass(frozen=True, kw_only=True)
class ReshardSummary:
    """One sync."""

    num_tensors: int
    num_parameters: int
    targets: int
    """Places that weights are delivered to."""
    workers: int
    """Of those, workers of rollout engines that take their own parts."""
    place_bytes: tuple[int, int]
    """That reach one place: least, most."""
    num_bytes: int
    """That reach all targets together."""
    moved_bytes: int
    """Of those, what crosses a process boundary."""
    lower_bound_bytes: int
    """Least that has to."""
    between_nodes_bytes: int
    by_transport: Mapping[str, int]
    busiest_source_bytes: int
    bucket_bytes: int
    sending_bytes: int
    """Memory of the blocks of the source that has most of them: two for each target that it serves."""
    predicted_s: float | None
    """Of the busiest link of any device, kept full (`ReshardPlan.predicted_s`)."""
    receiving_bytes: int
    """Memory of the blocks that the target with most of them reads: two rounds of buckets at most."""
    quantized_tensors: int = 0
    """Of the tensors, those that are quantized where they arrive."""
    quantizing_bytes: int = 0
    """Most that a target keeps of one such tensor until its blocks are whole."""


def layouts_of(
    forecast: Forecast, processes: Sequence[str], contexts: Sequence[RankContext]
) -> tuple[WeightLayout, ...]:
    """Of all ranks, each in the process and on the device that host it."""
    return tuple(
        on_physical_device(layout if layout.process else replace(layout, process=process), ctx.accelerators)
        for layouts, process, ctx in zip(forecast.layouts, processes, contexts, strict=True)
        for layout in layouts
    )


class _StoreOfTheRun(ObjectStoreTransport):
    """This process is on no cluster, and the run will be."""

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return True


def plan_move(
    source: Sequence[WeightLayout], target: Sequence[WeightLayout], *, bucket_bytes: int, transport: str = "auto"
) -> ReshardPlan:
    """The plan that a run between these layouts would carry out.

    Raises:
        LayoutError: as `summarize`.
    """
    named = named_transports(allowed_transports(transport))
    transports = [_StoreOfTheRun if known is ObjectStoreTransport else known for known in named]
    return plan_reshard(source, target, bucket_bytes=bucket_bytes, transports=transports)


def summarize(
    source: Sequence[WeightLayout], target: Sequence[WeightLayout], *, bucket_bytes: int, transport: str = "auto"
) -> ReshardSummary:
    """Plans the move and counts it.

    Raises:
        LayoutError: the two sides do not fit, or the transport that was named does not reach between them.
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
    """(of the source, of the target that need most): what is kept between two processes while weights move."""
    by_source: dict[int, int] = {}
    most = looked = seen = 0
    for part in plan.parts:
        if seen > MAX_BYTES:
            break
        largest = largest_buckets(part)
        looked += 1
        seen += plan.num_bytes // len(plan.parts)
        most = max(most, BLOCKS * sum(largest.values()))
        for source, num_bytes in largest.items():
            by_source[source] = by_source.get(source, 0) + BLOCKS * num_bytes
    return max(by_source.values(), default=0) * len(plan.parts) // max(looked, 1), most


def largest_buckets(part: Sequence[Bucket]) -> dict[int, int]:
    """Bytes of the largest bucket that each source sends to another process."""
    if isinstance(part, PackedBuckets):
        return part.largest_by_source(InProcessTransport.name)
    found: dict[int, int] = {}
    for bucket in part:
        if bucket.transport != InProcessTransport.name:
            found[bucket.source] = max(found.get(bucket.source, 0), bucket.num_bytes)
    return found


def num_parameters(plan: ReshardPlan) -> int:
    """Of the model, tied copies counted once."""
    return sum(math.prod(meta.shape) for meta in plan.tensors.values())
