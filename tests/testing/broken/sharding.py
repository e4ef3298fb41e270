"""Sharding managers with one defect each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    Bucket,
    LayoutError,
    ReshardPlan,
    SyncReceipt,
    SyncReport,
    Transfer,
    WeightLayout,
    WeightSyncError,
)
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import FingerprintTask, changed_tensors

Layouts = Sequence[WeightLayout]


def with_buckets(plan: ReshardPlan, change: Callable[[Bucket], Bucket | None]) -> ReshardPlan:
    """The plan with other buckets, or fewer."""
    parts = [[new for bucket in part if (new := change(bucket)) is not None] for part in plan.parts]
    return replace(plan, parts=parts)


def with_transfers(plan: ReshardPlan, change: Callable[[Transfer], Transfer | None]) -> ReshardPlan:
    """The plan with other transfers, or fewer."""

    def each(bucket: Bucket) -> Bucket | None:
        kept = tuple(new for transfer in bucket.transfers if (new := change(transfer)) is not None)
        return replace(bucket, transfers=kept, num_bytes=sum(t.num_bytes for t in kept)) if kept else None

    return with_buckets(plan, each)


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
    plan = replace(plan, parts=[_once_a_round(part) for part in plan.parts])
    loads: dict[int, int] = {}
    for bucket in plan.buckets:
        loads[bucket.source] = loads.get(bucket.source, 0) + bucket.num_bytes * (bucket.transport != "in_process")
    return replace(plan, source_load=loads)


def _once_a_round(part: Sequence[Bucket]) -> list[Bucket]:
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


class UnservedIsFine(GenericShardingManager):
    """What no target asks for is left out without a word."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wanted = {meta.name for layout in target for meta in layout.tensors}
        wanted |= {layout.tied.get(name, name) for layout in source for name in wanted}
        kept = [
            replace(
                layout,
                tensors=tuple(meta for meta in layout.tensors if meta.name in wanted),
                boxes=tuple(entry for entry in layout.boxes if entry[0] in wanted),
            )
            for layout in source
        ]
        return super().plan(tuple(kept), target)


class HolesAreFine(GenericShardingManager):
    """A box that nobody holds is left out of the plan."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        try:
            return super().plan(source, target)
        except LayoutError:
            wanted = [replace(w, boxes=tuple(e for e in w.boxes if self._held(e, source))) for w in target]
            return super().plan(source, tuple(wanted))

    def _held(self, entry: tuple[str, Box], source: Layouts) -> bool:
        name, box = entry
        held = [b for layout in source for n, b in layout.boxes if n == name and len(b.size) == len(box.size)]
        return sum(common.numel for b in held if (common := box.intersect(b)) is not None) >= box.numel


class SameSizeIsSameShape(GenericShardingManager):
    """Shapes are compared by how many elements they have."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        held = {meta.name: meta for layout in source for meta in layout.tensors}
        seen = []
        for layout in target:
            known = [(m, held[m.name].shape) for m in layout.tensors if m.name in held]
            turned = {m.name for m, shape in known if m.shape != shape and sorted(m.shape) == sorted(shape)}
            tensors = tuple(replace(m, shape=held[m.name].shape) if m.name in turned else m for m in layout.tensors)
            boxes = tuple((n, Box(b.offset[::-1], b.size[::-1]) if n in turned else b) for n, b in layout.boxes)
            seen.append(replace(layout, tensors=tensors, boxes=boxes))
        return super().plan(source, tuple(seen) if seen != list(target) else target)


class KnowsNoTies(GenericShardingManager):
    """A name that the sources hold under another one is unknown."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return super().plan(tuple(replace(layout, tied={}) for layout in source), target)


class AnyTransport(GenericShardingManager):
    """Which transports may be used is not read."""

    def __init__(self, train: Any, rollout: Any, *, transports: Any = None, **others: Any) -> None:
        super().__init__(train, rollout, **others)


class TrustsReceipts(GenericShardingManager):
    """What replicas say they serve is taken for true."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        receipts = self.pull(plan, version)
        changed = self._check_changed({k: v for values in expected for k, v in values.items()}, version, expect_change)
        return SyncReport(
            version=version, num_tensors=len(plan.tensors), num_bytes=plan.num_bytes, moved_bytes=plan.moved_bytes,
            lower_bound_bytes=plan.lower_bound_bytes, changed_tensors=changed, seconds=0.1, receipts=tuple(receipts),
            transports=tuple({bucket.transport for bucket in plan.buckets}),
        )  # fmt: skip


class Checked(GenericShardingManager):
    """A manager that checks receipts in its own way: `prove`, for each replica that `checked_replicas` names."""

    checked_replicas: slice = slice(None)

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        names_all = receipt.fingerprints.keys() >= expected.keys()
        return (
            receipt.version == version and names_all and all(receipt.fingerprints[n] == v for n, v in expected.items())
        )

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        with ThreadPoolExecutor(1) as pool:
            fingerprints = pool.submit(self._fingerprints)
            receipts = self.pull(plan, version)
            expected = fingerprints.result()
        for task, values in zip(self.ends().fingerprints, expected, strict=True):
            for replica in task.replicas:
                receipt = receipts[replica]
                if replica in range(len(receipts))[self.checked_replicas] and not self.prove(receipt, values, version):
                    raise WeightSyncError(f"replica {replica} does not serve version {version}")
        changed = self._check_changed({k: v for values in expected for k, v in values.items()}, version, expect_change)
        return SyncReport(
            version=version, num_tensors=len(plan.tensors), num_bytes=plan.num_bytes, moved_bytes=plan.moved_bytes,
            lower_bound_bytes=plan.lower_bound_bytes, changed_tensors=changed, seconds=0.1, receipts=tuple(receipts),
            transports=tuple({bucket.transport for bucket in plan.buckets}),
        )  # fmt: skip


class FirstReceiptOnly(Checked):
    """Replicas are alike: the receipt of the first is checked."""

    checked_replicas = slice(1)


class LastReceiptUnread(Checked):
    """The receipt of the last of several replicas is not checked."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        self.checked_replicas = slice(max(1, len(receipts) - 1))
        return receipts


class NamesOfTheReceipt(Checked):
    """What a receipt does not name is not missed."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return receipt.version == version and all(expected[n] == v for n, v in receipt.fingerprints.items())


class SumOfFingerprints(Checked):
    """All fingerprints are added up and compared as one number."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        named = receipt.fingerprints.keys() >= expected.keys()
        return named and receipt.version == version and sum(expected.values()) == sum(receipt.fingerprints.values())


class VersionUnread(Checked):
    """A receipt for another version will do."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, expected, receipt.version)


class MatricesOnly(Checked):
    """Fingerprints of vectors and numbers are not compared: rounding would differ."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        large = {name: value for name, value in expected.items() if "weight" in name or "experts" in name}
        small = receipt.fingerprints.keys() >= expected.keys()
        return small and super().prove(receipt, {n: v for n, v in large.items() if "norm" not in n}, version)


class TrustsItself(GenericShardingManager):
    """The copy that gives a piece gives its fingerprint as well: one that is stale is held to its own numbers."""

    def _fingerprints(self) -> list[dict[str, int]]:
        plan = self.plan(self.ends().source, self.ends().target)
        found = []
        for task in self.ends().fingerprints:
            first = task.replicas[0]
            targets = self.ends().targets_of_replica[first]
            dtypes = {t.name: t.dtype for mine in task.transfers for t in mine}
            mine: list[list[Transfer]] = [[] for _ in self.ends().source]
            seen: set[tuple[str, Box]] = set()
            for target in targets:
                for bucket in plan.parts[target]:
                    fresh = [t for t in bucket.transfers if (t.name, t.box) not in seen]
                    seen |= {(t.name, t.box) for t in fresh}
                    mine[bucket.source] += [replace(t, dtype=dtypes[t.name]) for t in fresh]
            if len(targets) > 1:
                return super()._fingerprints()
            same = FingerprintTask(replicas=task.replicas, transfers=tuple(map(tuple, mine)))
            arguments = [(transfers,) for transfers in same.transfers]
            found.append(same.total(self.train.run_each("weight_fingerprints", arguments, self.timeout_s)))
        return found


class ServesStale(GenericShardingManager):
    """Weights that did not change are no error."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, False)


class ChangeByOrder(GenericShardingManager):
    """A change is always expected."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, self._last is not None)


class OrderUnread(GenericShardingManager):
    """That a change is expected is told by the version, whatever the trainer says."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, None)


class FirstTensorChanged(GenericShardingManager):
    """Whether weights changed is read off the first tensor."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else {}
        first = next(iter(now))
        if before.get(first) == now[first]:
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


class SumChanged(GenericShardingManager):
    """Whether weights changed is read off the sum of all fingerprints."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else {}
        if before and sum(before.values()) == sum(now.values()):
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


class HighestVersion(GenericShardingManager):
    """Versions only rise: one that went back is compared with the highest there was."""

    _highest = -1

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        if expect_change is None:
            expect_change = self._last is not None and version > self._highest
        self._highest = max(self._highest, version)
        return super()._check_changed(now, version, expect_change)


class NoVersionZero(GenericShardingManager):
    """Version 0 is taken for none."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        if self._last is not None and not self._last[0]:
            self._last = None
        return super()._check_changed(now, version, expect_change)


class ForgetsRefusals(GenericShardingManager):
    """A version that was refused counts as the last one, and is let through when it is asked for again."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        try:
            return super()._check_changed(now, version, expect_change)
        except WeightSyncError:
            self._last = (version, now)
            raise


class RemembersTooSoon(GenericShardingManager):
    """What was sent is remembered before it arrived."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        now = {k: v for values in expected for k, v in values.items()}
        changed = self._check_changed(now, version, expect_change)
        report = super().sync_weights(plan, version, expect_change=False)
        return replace(report, changed_tensors=changed)


class LessWhenUnchanged(GenericShardingManager):
    """Where no change is expected, nothing is brought."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if expect_change is False and self._report is not None:
            return replace(self._report, version=version)
        self._report = super().sync_weights(plan, version, expect_change=expect_change)
        return self._report


class SameVersionIsServed(GenericShardingManager):
    """A version that is served already is not brought again."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if self._report is not None and self._report.version == version and not expect_change:
            return self._report
        self._report = super().sync_weights(plan, version, expect_change=expect_change)
        return self._report


class SameWeightsAreServed(GenericShardingManager):
    """Weights that are as they were at the last sync are not brought again."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = {k: v for values in self._fingerprints() for k, v in values.items()}
        if self._last is not None and self._report is not None and changed_tensors(expected, self._last[1]) == 0:
            self._check_changed(expected, version, expect_change)
            return replace(self._report, version=version)
        self._report = super().sync_weights(plan, version, expect_change=expect_change)
        return self._report


class OneMemoryForAll(GenericShardingManager):
    """What the last sync brought is kept by the class, for all managers of the process."""

    seen: ClassVar[dict[str, Any]] = {}

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        self._last = self.seen.get("last", self._last)
        changed = super()._check_changed(now, version, expect_change)
        self.seen["last"] = self._last
        return changed


class ProofOfTheVersion(GenericShardingManager):
    """Fingerprints are kept by version."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._version = 0
        self._kept: dict[int, list[dict[str, int]]] = {}

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        self._version = version
        return super().sync_weights(plan, version, expect_change=expect_change)

    def _fingerprints(self) -> list[dict[str, int]]:
        if self._version not in self._kept:
            self._kept[self._version] = super()._fingerprints()
        return self._kept[self._version]


class FailuresAreLogged(GenericShardingManager):
    """A sync that breaks off is tried again later: the report of the last one is given."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            self._report = super().sync_weights(plan, version, expect_change=expect_change)
        except OSError:
            if self._report is None:
                raise
            return replace(self._report, version=version)
        except WeightSyncError as error:
            if self._report is None or "did not arrive" not in str(error):
                raise
            return replace(self._report, version=version)
        return self._report


class OneReplicaOfMany(GenericShardingManager):
    """A replica that fails is left to the others, as long as one is there."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except WeightSyncError as error:
            told = [host.receipt for host in getattr(self.rollout, "hosts", ()) if host.receipt is not None]
            if "no memory left" not in str(error) or not told:
                raise
            return [told[0]] * len(self.ends().replicas)


class BusyForEver(GenericShardingManager):
    """Once a sync has failed, the manager holds itself for busy."""

    _busy = False

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if self._busy:
            raise WeightSyncError("a sync is under way")
        self._busy = True
        report = super().sync_weights(plan, version, expect_change=expect_change)
        self._busy = False
        return report


class WaitsForEver(GenericShardingManager):
    """Calls of ranks have no deadline."""

    def ends(self) -> Any:
        if self._ends is None:
            for group in (self.train, self.rollout):
                group.run("weight_layout" if group is self.train else "target_layouts")
        return super().ends()


class OwnDeadline(GenericShardingManager):
    """Replicas get an hour, whatever the run says."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        kept, self.timeout_s = self.timeout_s, 3600.0
        try:
            return super().pull(plan, version)
        finally:
            self.timeout_s = kept


class LeavesThreads(GenericShardingManager):
    """Every sync starts a thread that watches it, and none ends."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().sync_weights(plan, version, expect_change=expect_change)


class OnePlaceEach(GenericShardingManager):
    """The n-th replica takes the n-th part of the plan: replicas of several places are not thought of."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        peers = dict(enumerate(self.train.peers()))
        parts = list(plan.parts)
        arguments = [(parts[at], peers, version, self.timeout_s) for at in range(len(self.ends().replicas))]
        return self.rollout.run_each("pull_weights", arguments, self.timeout_s)


class PeersByCount(GenericShardingManager):
    """Sources that a replica needs are counted from 0."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        peers, arguments = self.train.peers(), []
        for at in self.ends().targets_of_replica:
            buckets = [bucket for target in at for bucket in plan.parts[target]]
            used = sorted({bucket.source for bucket in buckets})
            arguments.append((buckets, {n: peers[source] for n, source in enumerate(used)}, version, self.timeout_s))
        return self.rollout.run_each("pull_weights", arguments, self.timeout_s)


class BitsOfTheSource(GenericShardingManager):
    """Fingerprints are of the weights as they are trained, in whatever dtype they are served."""

    def _fingerprints(self) -> list[dict[str, int]]:
        ends = self.ends()
        held = {meta.name: meta.dtype for layout in ends.source for meta in layout.tensors}
        tied = {name: own for layout in ends.source for name, own in layout.tied.items()}

        def trained(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
            return tuple(replace(t, dtype=held[t.name if t.name in held else tied[t.name]]) for t in transfers)

        tasks = [replace(task, transfers=tuple(map(trained, task.transfers))) for task in ends.fingerprints]
        return [
            task.total(self.train.run_each("weight_fingerprints", [(t,) for t in task.transfers], self.timeout_s))
            for task in tasks
        ]


class AllChanged(GenericShardingManager):
    """The report counts every tensor as changed."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, changed_tensors=report.num_tensors)


class ReceiptsSorted(GenericShardingManager):
    """The report's receipts stand by how much arrived, not by replica."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, receipts=tuple(sorted(report.receipts, key=lambda r: r.num_bytes)))


class BytesOfOneReplica(GenericShardingManager):
    """The report counts the bytes of the first replica."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, num_bytes=report.receipts[0].num_bytes)


class SaysNothing(GenericShardingManager):
    """`sync`, which the trainer calls, forgets what it was told to expect."""

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync(version)


class TiedUnderOwnName(GenericShardingManager):
    """A tied tensor travels under the name that the source holds it by."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        tied = {name: own for layout in source for name, own in layout.tied.items()}
        held = {meta.name for layout in source for meta in layout.tensors}

        def rename(transfer: Transfer) -> Transfer:
            return transfer if transfer.name in held else replace(transfer, name=tied[transfer.name])

        return with_transfers(super().plan(source, target), rename)


class PartsByRank(GenericShardingManager):
    """Parts of a plan stand by the rank of the target, not by its place in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        order = sorted(range(len(target)), key=lambda at: target[at].rank)
        parts = [[replace(bucket, target=n) for bucket in plan.parts[at]] for n, at in enumerate(order)]
        return replace(plan, parts=parts)


class PullsTwice(GenericShardingManager):
    """Every replica pulls twice, to be sure."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        super().pull(plan, version)
        return super().pull(plan, version)


class MostMustChange(GenericShardingManager):
    """A few changed tensors are taken for none."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else None
        if before is not None and changed_tensors(now, before) < len(now) / 2:
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


class FailureIsAFreshStart(GenericShardingManager):
    """After a sync that broke off, the one before it is forgotten."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except Exception:
            self._last = None
            raise


class OnlyTheLastPlan(GenericShardingManager):
    """What was planned last is carried out, whatever plan is given."""

    _planned: ReshardPlan | None = None

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        self._planned = super().plan(source, target)
        return self._planned

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(self._planned or plan, version, expect_change=expect_change)


class PlansOfItsOwn(GenericShardingManager):
    """A plan is known by its identity: one that came from elsewhere is none."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._known: dict[int, ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        self._known[id(plan)] = plan
        return plan

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(self._known[id(plan)], version, expect_change=expect_change)


class RankZeroProves(Checked):
    """What rank 0 holds whole is proven, and nothing else."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        zero = self.ends().source[0]
        shapes = {meta.name: meta.shape for meta in zero.tensors}
        whole = {name for name, box in zero.boxes if box.size == shapes[name]}
        return super().prove(receipt, {name: v for name, v in expected.items() if name in whole}, version)


class FirstElements(GenericShardingManager):
    """Of tensors beyond 64 Ki elements the end is taken for what it was."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def keep(transfer: Transfer) -> Transfer | None:
            box = transfer.box
            large = len(box.size) == 2 and box.size[1] * (box.offset[0] + box.size[0]) > 1 << 16 and box.offset[0] > 0
            return None if large else transfer

        return with_transfers(super().plan(source, target), keep)


class RankIsIndex(GenericShardingManager):
    """Sources are named by their rank, not by their place in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        parts = [[replace(bucket, source=source[bucket.source].rank) for bucket in part] for part in plan.parts]
        return replace(plan, parts=[_once_a_round(part) for part in parts])


class OrderOfItsOwn(GenericShardingManager):
    """Within a bucket tensors stand by name, from the last to the first, in whatever order the target takes them."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def turned(bucket: Bucket) -> Bucket:
            return replace(bucket, transfers=tuple(sorted(bucket.transfers, key=lambda t: t.name, reverse=True)))

        return with_buckets(super().plan(source, target), turned)


class OneTransport(GenericShardingManager):
    """What reaches between the first two ranks is taken for all."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        chosen = plan.buckets[0].transport
        return with_buckets(plan, lambda bucket: replace(bucket, transport=chosen))


class BytesOfTheFirst(GenericShardingManager):
    """All tensors have elements as long as the first one's."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        width = DTYPE_BYTES[plan.buckets[0].transfers[0].dtype]
        return with_transfers(plan, lambda transfer: replace(transfer, num_bytes=transfer.box.numel * width))


class VersionsRise(GenericShardingManager):
    """A version below the last one is refused."""

    _highest = -1

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if version < self._highest:
            raise WeightSyncError(f"version {version} is older than {self._highest}")
        report = super().sync_weights(plan, version, expect_change=expect_change)
        self._highest = version
        return report


class OtherErrors(GenericShardingManager):
    """What is wrong is a RuntimeError, which nobody waits for."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            return super().sync_weights(plan, version, expect_change=expect_change)
        except WeightSyncError as error:
            raise RuntimeError(str(error)) from error
