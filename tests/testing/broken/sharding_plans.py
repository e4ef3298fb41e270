"""Sharding managers whose plans are wrong: what is sent, by whom, in which order, how it is counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from broken.sharding_tools import Layouts, with_buckets, with_transfers
from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    Bucket,
    ReshardPlan,
    Transfer,
)
from rlsdk.sharding import GenericShardingManager


class BigBuckets(GenericShardingManager):
    """The bound on buckets is not read."""

    def __init__(self, train: Any, rollout: Any, *, bucket_bytes: int = 0, **others: Any) -> None:
        super().__init__(train, rollout, **others)


class FewParameters(GenericShardingManager):
    """Its constructor takes no transports."""

    def __init__(self, train: Any, rollout: Any, *, timeout_s: float = 600.0, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes)


class OneBucketShort(GenericShardingManager):
    """The last bucket of the first target is left out."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(plan.parts[0])[:-1], *plan.parts[1:]])


class LastExpertsLost(GenericShardingManager):
    """Of stacked experts, those behind the fourth are forgotten."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def keep(transfer: Transfer) -> Transfer | None:
            return None if len(transfer.box.size) == 3 and transfer.box.offset[0] >= 4 else transfer

        return with_transfers(super().plan(source, target), keep)


class TwoDimensions(GenericShardingManager):
    """Boxes have rows and columns: a third dimension is taken whole, wherever it was cut."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def flat(transfer: Transfer) -> Transfer:
            box = transfer.box
            if len(box.size) < 3 or box.size[1] == 10:
                return transfer
            box = Box((box.offset[0], 0, box.offset[2]), (box.size[0], 10, box.size[2]))
            return replace(transfer, box=box, num_bytes=box.numel * DTYPE_BYTES[transfer.dtype])

        return with_transfers(super().plan(source, target), flat)


class OnePieceTwice(GenericShardingManager):
    """The first bucket of every target comes again at its end."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[[*part, replace(part[0], round=part[-1].round + 1)] for part in plan.parts])


class LastRoundFirst(GenericShardingManager):
    """Rounds come in the reverse order."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(part)[::-1] for part in plan.parts])


class NamesInterleaved(GenericShardingManager):
    """A round takes some of every tensor, and the next takes some more."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(self._dealt(list(part))) for part in plan.parts])

    def _dealt(self, part: list[Bucket]) -> Iterator[Bucket]:
        last = part[-1].round
        odd = [b for b in part if b.round % 2]
        for bucket in [b for b in part if not b.round % 2] + odd:
            yield replace(bucket, round=bucket.round // 2 + (last // 2 + 1 if bucket.round % 2 else 0))


class BytesOfFloats(GenericShardingManager):
    """Every element is four bytes long."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return with_transfers(plan, lambda transfer: replace(transfer, num_bytes=transfer.box.numel * 4))


class WideWire(GenericShardingManager):
    """Everything travels as float32, and is cast where it arrives."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wide = [replace(w, tensors=tuple(replace(m, dtype=_wide(m.dtype)) for m in w.tensors)) for w in target]
        held = [replace(h, tensors=tuple(replace(m, dtype=_wide(m.dtype)) for m in h.tensors)) for h in source]
        return super().plan(tuple(held), tuple(wide))


def _wide(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


class NarrowWire(GenericShardingManager):
    """Everything travels as bfloat16, which is what models are served in."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)

        def narrow(transfer: Transfer) -> Transfer:
            if transfer.dtype not in ("float32", "float64"):
                return transfer
            return replace(transfer, dtype="bfloat16", num_bytes=transfer.box.numel * 2)

        return with_transfers(plan, narrow)


class AlwaysOutside(GenericShardingManager):
    """What lies in the same process goes through shared memory as well, and counts as what had to cross."""

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


class FirstCopySends(GenericShardingManager):
    """Where several ranks hold a piece, the first of them sends it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return _with_holders(super().plan(source, target), source, lambda holders: holders[0])


class LastCopySends(GenericShardingManager):
    """Where several ranks hold a piece the last of them sends it, from whatever node."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return _with_holders(super().plan(source, target), source, lambda holders: holders[-1])


class AnotherPlanEachTime(GenericShardingManager):
    """Of two right plans every second call gives the other one."""

    calls = itertools.count()

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan, turn = super().plan(source, target), -1 if next(self.calls) % 2 else 1
        return replace(plan, parts=[sorted(part, key=lambda b: (b.round, turn * b.source)) for part in plan.parts])


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


class LoadsOfNobody(GenericShardingManager):
    """What each source sends is not counted."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return replace(super().plan(source, target), source_load={})


class PlansOnce(GenericShardingManager):
    """The plan is made once and kept: as many ranks as before get the plan of before."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._kept: dict[tuple[int, int], ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        key = len(source), len(target)
        if key not in self._kept:
            self._kept[key] = super().plan(source, target)
        return self._kept[key]


class PlansByNames(GenericShardingManager):
    """Plans are kept by names and boxes: in whatever dtype and process they are."""

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


class HoldsAFunction(GenericShardingManager):
    """A plan cannot be sent: it holds a lock."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=_Guarded(plan.parts))


class _Guarded(tuple[Sequence[Bucket], ...]):
    def __new__(cls, parts: Sequence[Sequence[Bucket]]) -> _Guarded:
        made = super().__new__(cls, parts)
        made.lock = threading.Lock()  # type: ignore[attr-defined]
        return made
