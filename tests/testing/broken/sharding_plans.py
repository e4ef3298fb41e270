"""Sharding managers whose plans are wrong: coverage, senders, order, byte counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from broken.defect import defect
from broken.sharding_base import Layouts, with_buckets
from rlsdk.interfaces import Bucket, ReshardPlan
from rlsdk.sharding import GenericShardingManager


@defect({"plan.bytes": "largest bucket"})
class BigBuckets(GenericShardingManager):
    """The bucket bound is ignored."""

    def __init__(self, train: Any, rollout: Any, *, bucket_bytes: int = 0, **others: Any) -> None:
        super().__init__(train, rollout, **others)


@defect({"constructor": "parameters that it lacks", "plan.transports": "unexpected keyword argument"})
class FewParameters(GenericShardingManager):
    """Its constructor has no `transports`."""

    def __init__(self, train: Any, rollout: Any, *, timeout_s: float = 600.0, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes)


@defect({"plan.cover": "elements not sent once", "sync.bitwise": "elements came"})
class OneBucketShort(GenericShardingManager):
    """The last bucket of the first target is missing."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(plan.parts[0])[:-1], *plan.parts[1:]])


@defect({"plan.cover": "elements not sent once", "plan.order": "out of order"})
class OnePieceTwice(GenericShardingManager):
    """The first bucket of every target is repeated at the end."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[[*part, replace(part[0], round=part[-1].round + 1)] for part in plan.parts])


@defect({"plan.order": "out of order", "sync.consecutive_pieces": "out of order"})
class LastRoundFirst(GenericShardingManager):
    """Rounds are in reverse order."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(part)[::-1] for part in plan.parts])


def _wide(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


@defect({"plan.bytes": "bytes", "sync.values": "does not serve version"})
class WideWire(GenericShardingManager):
    """Everything is sent as float32 and cast on arrival."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wide = [replace(w, tensors=tuple(replace(m, dtype=_wide(m.dtype)) for m in w.tensors)) for w in target]
        held = [replace(h, tensors=tuple(replace(m, dtype=_wide(m.dtype)) for m in h.tensors)) for h in source]
        return super().plan(tuple(held), tuple(wide))


def once_a_round(part: Sequence[Bucket]) -> list[Bucket]:
    """Buckets of one source and round as one."""
    found: dict[tuple[int, int], Bucket] = {}
    for bucket in part:
        key = bucket.round, bucket.source
        before = found.get(key)
        if before is None:
            found[key] = bucket
        else:
            found[key] = replace(
                before, transfers=before.transfers + bucket.transfers, num_bytes=before.num_bytes + bucket.num_bytes
            )
    return [found[key] for key in sorted(found)]


def _with_holders(plan: ReshardPlan, source: Layouts, choose: Callable[[list[int]], int]) -> ReshardPlan:
    """The plan with buckets from other sources that hold the same; those within a process stay."""

    def other(bucket: Bucket) -> Bucket:
        holders = [
            at
            for at, layout in enumerate(source)
            if all(
                any(
                    name in (t.name, layout.tied.get(t.name)) and box.intersect(t.box) == t.box
                    for name, box in layout.boxes
                )
                for t in bucket.transfers
                if len(t.box.size)
                == len(next(b for n, b in layout.boxes if n in (t.name, layout.tied.get(t.name))).size)
            )
        ]
        return bucket if bucket.transport == "in_process" or not holders else replace(bucket, source=choose(holders))

    plan = with_buckets(plan, other)
    plan = replace(plan, parts=[once_a_round(part) for part in plan.parts])
    loads: dict[int, int] = {}
    for bucket in plan.buckets:
        loads[bucket.source] = loads.get(bucket.source, 0) + bucket.num_bytes * (bucket.transport != "in_process")
    return replace(plan, source_load=loads)


@defect({"plan.near": "sent from afar", "plan.spread": "largest load over a share"})
class FirstCopySends(GenericShardingManager):
    """If several ranks hold a piece, the first always sends it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return _with_holders(super().plan(source, target), source, lambda holders: holders[0])


@defect({"plan.near": "sent from afar", "plan.spread": "largest load over a share"})
class LastCopySends(GenericShardingManager):
    """If several ranks hold a piece, the last always sends it, from any node."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return _with_holders(super().plan(source, target), source, lambda holders: holders[-1])


@defect(
    {"plan.any_layouts": "plans that are not for these layouts", "plan.pure": "two plans of the same layouts differ"}
)
class AnotherPlanEachTime(GenericShardingManager):
    """Every second call returns another plan, which is also right."""

    calls = itertools.count()

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan, turn = super().plan(source, target), -1 if next(self.calls) % 2 else 1
        return replace(plan, parts=[sorted(part, key=lambda b: (b.round, turn * b.source)) for part in plan.parts])


@defect({"plan.pure": "calls of ranks that planning made"})
class AsksWhilePlanning(GenericShardingManager):
    """Planning asks the ranks for their layouts."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        self.train.run("weight_layout", timeout_s=self.timeout_s)
        return super().plan(source, target)


@defect({"plan.rounds": "bytes of"})
class LastRoundJoined(GenericShardingManager):
    """A small last round is merged into the previous one, over the bound."""

    def plan(self, source, target):
        plan = super().plan(source, target)
        parts = []
        for part in plan.parts:
            last = max((bucket.round for bucket in part), default=0)
            size = sum(bucket.num_bytes for bucket in part if bucket.round == last)
            if last == 0 or size * 4 > plan.bucket_bytes:
                parts.append(tuple(part))
                continue
            joined, tail = list(part), [bucket for bucket in part if bucket.round == last]
            joined = [bucket for bucket in joined if bucket.round != last]
            for bucket in tail:
                at = next((i for i, b in enumerate(joined) if b.round == last - 1 and b.source == bucket.source), None)
                if at is None:
                    joined.append(replace(bucket, round=last - 1))
                else:
                    joined[at] = replace(
                        joined[at],
                        transfers=(*joined[at].transfers, *bucket.transfers),
                        num_bytes=joined[at].num_bytes + bucket.num_bytes,
                    )
            parts.append(tuple(sorted(joined, key=lambda b: (b.round, b.source))))
        return replace(plan, parts=tuple(parts))


@defect({"plan.fields": "holds no box with", "sync.bitwise": "did not arrive"})
class RankIsIndex(GenericShardingManager):
    """Sources are named by their rank, not by their position in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        parts = [[replace(bucket, source=source[bucket.source].rank) for bucket in part] for part in plan.parts]
        return replace(plan, parts=[once_a_round(part) for part in parts])


@defect({"sync.consecutive_pieces": "came in pieces, others between them"})
class OrderOfItsOwn(GenericShardingManager):
    """Within a bucket tensors are in reverse order of names, regardless of the target's order."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def turned(bucket: Bucket) -> Bucket:
            return replace(bucket, transfers=tuple(sorted(bucket.transfers, key=lambda t: t.name, reverse=True)))

        return with_buckets(super().plan(source, target), turned)


@defect({"plan.bytes": "lower bound"})
class BoundIsWhatMoved(GenericShardingManager):
    """The lower bound equals the moved bytes."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, lower_bound_bytes=plan.num_bytes)


@defect({"plan.preference": "other than the first"})
class AnyTransport(GenericShardingManager):
    """The list of transports is ignored."""

    def __init__(self, train, rollout, *, timeout_s=600.0, bucket_bytes=64 << 20, transports=None):
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes)
        self.transports = None if transports is None else tuple(transports)
