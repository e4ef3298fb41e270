"""Sharding managers whose plans are wrong: coverage, senders, order, byte counts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from broken.sharding_base import Layouts, with_buckets, with_transfers
from rlsdk.interfaces import DTYPE_BYTES, Box, Bucket, ReshardPlan, SyncReport, Transfer
from rlsdk.sharding import GenericShardingManager


class BigBuckets(GenericShardingManager):
    """The bucket bound is ignored."""

    def __init__(self, train: Any, rollout: Any, *, bucket_bytes: int = 0, **others: Any) -> None:
        super().__init__(train, rollout, **others)


class FewParameters(GenericShardingManager):
    """Its constructor has no `transports`."""

    def __init__(self, train: Any, rollout: Any, *, timeout_s: float = 600.0, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes)


class OneBucketShort(GenericShardingManager):
    """The last bucket of the first target is missing."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(plan.parts[0])[:-1], *plan.parts[1:]])


class LastExpertsLost(GenericShardingManager):
    """Stacked experts after the fourth are missing."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def keep(transfer: Transfer) -> Transfer | None:
            return None if len(transfer.box.size) == 3 and transfer.box.offset[0] >= 4 else transfer

        return with_transfers(super().plan(source, target), keep)


class TwoDimensions(GenericShardingManager):
    """Boxes have two dimensions: the third is always taken whole."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def flat(transfer: Transfer) -> Transfer:
            box = transfer.box
            if len(box.size) < 3 or box.size[1] == 10:
                return transfer
            box = Box((box.offset[0], 0, box.offset[2]), (box.size[0], 10, box.size[2]))
            return replace(transfer, box=box, num_bytes=box.numel * DTYPE_BYTES[transfer.dtype])

        return with_transfers(super().plan(source, target), flat)


class OnePieceTwice(GenericShardingManager):
    """The first bucket of every target is repeated at the end."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[[*part, replace(part[0], round=part[-1].round + 1)] for part in plan.parts])


class LastRoundFirst(GenericShardingManager):
    """Rounds are in reverse order."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(part)[::-1] for part in plan.parts])


class NamesInterleaved(GenericShardingManager):
    """Each round has some of every tensor, so that tensors are not contiguous."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(self._dealt(list(part))) for part in plan.parts])

    def _dealt(self, part: list[Bucket]) -> Iterator[Bucket]:
        last = part[-1].round
        odd = [b for b in part if b.round % 2]
        for bucket in [b for b in part if not b.round % 2] + odd:
            yield replace(bucket, round=bucket.round // 2 + (last // 2 + 1 if bucket.round % 2 else 0))


class BytesOfFloats(GenericShardingManager):
    """Every element has four bytes."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return with_transfers(plan, lambda transfer: replace(transfer, num_bytes=transfer.box.numel * 4))


def _wide(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


class WideWire(GenericShardingManager):
    """Everything is sent as float32 and cast on arrival."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wide = [replace(w, tensors=tuple(replace(m, dtype=_wide(m.dtype)) for m in w.tensors)) for w in target]
        held = [replace(h, tensors=tuple(replace(m, dtype=_wide(m.dtype)) for m in h.tensors)) for h in source]
        return super().plan(tuple(held), tuple(wide))


class NarrowWire(GenericShardingManager):
    """Everything is sent as bfloat16."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)

        def narrow(transfer: Transfer) -> Transfer:
            if transfer.dtype not in ("float32", "float64"):
                return transfer
            return replace(transfer, dtype="bfloat16", num_bytes=transfer.box.numel * 2)

        return with_transfers(plan, narrow)


class AlwaysOutside(GenericShardingManager):
    """Transfers within a process use shared memory and count as bytes that crossed."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        away = [replace(layout, process=f"{layout.process}*") for layout in target]
        return super().plan(source, tuple(away))


class BoundPerSource(GenericShardingManager):
    """A round has a bucket of the full size from each source."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[self._joined(list(part)) for part in plan.parts])

    def _joined(self, part: list[Bucket]) -> list[Bucket]:
        made: list[Bucket] = []
        for bucket in part:
            last = next((b for b in reversed(made) if b.source == bucket.source), None)
            newest = made[-1].round if made else 0
            fits = last is not None and last.round == newest and last.num_bytes + bucket.num_bytes <= self.bucket_bytes
            if fits and last is not None:
                made[made.index(last)] = replace(
                    last, transfers=last.transfers + bucket.transfers, num_bytes=last.num_bytes + bucket.num_bytes
                )
            else:
                made.append(replace(bucket, round=newest + (last is not None and last.round == newest)))
        return sorted(made, key=lambda b: (b.round, b.source))


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


class FirstCopySends(GenericShardingManager):
    """If several ranks hold a piece, the first always sends it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return _with_holders(super().plan(source, target), source, lambda holders: holders[0])


class LastCopySends(GenericShardingManager):
    """If several ranks hold a piece, the last always sends it, from any node."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return _with_holders(super().plan(source, target), source, lambda holders: holders[-1])


class AnotherPlanEachTime(GenericShardingManager):
    """Every second call returns another plan, which is also right."""

    calls = itertools.count()

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan, turn = super().plan(source, target), -1 if next(self.calls) % 2 else 1
        return replace(plan, parts=[sorted(part, key=lambda b: (b.round, turn * b.source)) for part in plan.parts])


class LoadsOfNobody(GenericShardingManager):
    """The load of each source is not counted."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return replace(super().plan(source, target), source_load={})


class PlansOnce(GenericShardingManager):
    """The plan is made once and reused for equal numbers of ranks."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._kept: dict[tuple[int, int], ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        key = len(source), len(target)
        if key not in self._kept:
            self._kept[key] = super().plan(source, target)
        return self._kept[key]


class PlansByNames(GenericShardingManager):
    """Plans are cached by names and boxes, without dtypes and processes."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._kept: dict[Any, ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        key = tuple(layout.boxes for layout in source), tuple(layout.boxes for layout in target)
        if key not in self._kept:
            self._kept[key] = super().plan(source, target)
        return self._kept[key]


class AsksWhilePlanning(GenericShardingManager):
    """Planning asks the ranks for their layouts."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        self.train.run("weight_layout", timeout_s=self.timeout_s)
        return super().plan(source, target)


class _Guarded(tuple[Sequence[Bucket], ...]):
    def __new__(cls, parts: Sequence[Sequence[Bucket]]) -> _Guarded:
        made = super().__new__(cls, parts)
        made.lock = threading.Lock()  # type: ignore[attr-defined]
        return made


class HoldsAFunction(GenericShardingManager):
    """A plan cannot be pickled: it contains a lock."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=_Guarded(plan.parts))


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


class TiedUnderOwnName(GenericShardingManager):
    """A tied tensor is sent under the source's name."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        tied = {name: own for layout in source for name, own in layout.tied.items()}
        held = {meta.name for layout in source for meta in layout.tensors}

        def rename(transfer: Transfer) -> Transfer:
            return transfer if transfer.name in held else replace(transfer, name=tied[transfer.name])

        return with_transfers(super().plan(source, target), rename)


class PartsByRank(GenericShardingManager):
    """Parts of a plan are ordered by the target's rank, not by its position in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        order = sorted(range(len(target)), key=lambda at: target[at].rank)
        parts = [[replace(bucket, target=n) for bucket in plan.parts[at]] for n, at in enumerate(order)]
        return replace(plan, parts=parts)


class OnlyTheLastPlan(GenericShardingManager):
    """The latest plan is executed, whatever plan is given."""

    _planned: ReshardPlan | None = None

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        self._planned = super().plan(source, target)
        return self._planned

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(self._planned or plan, version, expect_change=expect_change)


class PlansOfItsOwn(GenericShardingManager):
    """A plan is recognised by its identity: one from another process is unknown."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._known: dict[int, ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        self._known[id(plan)] = plan
        return plan

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(self._known[id(plan)], version, expect_change=expect_change)


class RankIsIndex(GenericShardingManager):
    """Sources are named by their rank, not by their position in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        parts = [[replace(bucket, source=source[bucket.source].rank) for bucket in part] for part in plan.parts]
        return replace(plan, parts=[once_a_round(part) for part in parts])


class OrderOfItsOwn(GenericShardingManager):
    """Within a bucket tensors are in reverse order of names, regardless of the target's order."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def turned(bucket: Bucket) -> Bucket:
            return replace(bucket, transfers=tuple(sorted(bucket.transfers, key=lambda t: t.name, reverse=True)))

        return with_buckets(super().plan(source, target), turned)


class OneTransport(GenericShardingManager):
    """The transport between the first two ranks is used for all."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        chosen = plan.buckets[0].transport
        return with_buckets(plan, lambda bucket: replace(bucket, transport=chosen))


class BytesOfTheFirst(GenericShardingManager):
    """All tensors have the element size of the first one."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        width = DTYPE_BYTES[plan.buckets[0].transfers[0].dtype]
        return with_transfers(plan, lambda transfer: replace(transfer, num_bytes=transfer.box.numel * width))


class SingleNumbersLost(GenericShardingManager):
    """Tensors with a single element are missing."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        shapes = {meta.name: meta.shape for layout in source for meta in layout.tensors}

        def keep(transfer: Transfer) -> Transfer | None:
            return None if all(size == 1 for size in shapes.get(transfer.name, (2,))) else transfer

        return with_transfers(super().plan(source, target), keep)


class BoundIsWhatMoved(GenericShardingManager):
    """The lower bound equals the moved bytes."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, lower_bound_bytes=plan.num_bytes)


class LastRoundsTogether(GenericShardingManager):
    """The last two rounds of a part are merged."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[self._joined(list(part)) for part in plan.parts])

    def _joined(self, part: list[Bucket]) -> list[Bucket]:
        rounds = [list(found) for _, found in groupby(part, key=lambda bucket: bucket.round)]
        if len(rounds) < 2:
            return part
        early = rounds[-2][0].round
        return [bucket for found in rounds[:-1] for bucket in found] + [replace(b, round=early) for b in rounds[-1]]


class AnyTransport(GenericShardingManager):
    """The list of transports is ignored."""

    def __init__(self, train, rollout, *, timeout_s=600.0, bucket_bytes=64 << 20, transports=None):
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes)
        self.transports = None if transports is None else tuple(transports)
