"""Sharding managers that are wrong from sync to sync: other plans, retries, names, what they keep, what they report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broken.sharding_base import Layouts, with_buckets
from rlsdk.interfaces import DeadlineError, LayoutError, Relay, ReshardPlan, SyncReceipt, SyncReport, WeightSyncError
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.planner import choose_transport
from rlsdk.sharding.transports import named_transports


class PlanOfItsOwn(GenericShardingManager):
    """The manager's own plan for its groups is executed, not the given one."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        own = self.plan(self.ends().source, self.ends().target)
        return super().sync_weights(own, version, expect_change=expect_change)


class FirstPlan(GenericShardingManager):
    """The first plan is executed at every sync."""

    first: ReshardPlan | None = None

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        self.first = self.first or plan
        return super().pull(self.first, version)


class OneMoreTry(GenericShardingManager):
    """After a deadline the transfer is tried once more within the sync."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except DeadlineError:
            return super().pull(plan, version)


def _without(manager: GenericShardingManager, source: Layouts, target: Layouts, out: int) -> ReshardPlan:
    """A plan in which this source sends nothing."""
    plan = GenericShardingManager.plan(manager, (*source[:out], *source[out + 1 :]), target)
    return with_buckets(plan, lambda bucket: replace(bucket, source=bucket.source + (bucket.source >= out)))


class OtherHolders(GenericShardingManager):
    """If a source is dead, another one that holds the same weights sends them."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except (WeightSyncError, OSError):
            ends = self.ends()
            for out in range(len(ends.source)):
                try:
                    return super().pull(_without(self, ends.source, ends.target, out), version)
                except (LayoutError, WeightSyncError, OSError):
                    continue
            raise


class AvoidsTheFailed(GenericShardingManager):
    """After a failed sync the first source sends only what no other one holds."""

    avoided = False

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        try:
            return _without(self, source, target, 0) if self.avoided else super().plan(source, target)
        except LayoutError:
            return super().plan(source, target)

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except Exception:
            self.avoided = True
            raise


class AsksOnce(GenericShardingManager):
    """A request for layouts that failed is not repeated."""

    asked = False

    def ends(self) -> Any:
        if self._ends is None and self.asked:
            raise WeightSyncError("there are no layouts")
        self.asked = True
        return super().ends()


class FirstReplicas(GenericShardingManager):
    """Handles of the replicas that forward are requested once."""

    kept: Any = None

    def _relays(self, plan: ReshardPlan) -> dict[int, Relay]:
        self.kept = self.kept or list(self.rollout.peers())
        with patch.object(self.rollout, "peers", lambda: self.kept):
            return super()._relays(plan)


class OneNameForManagers(GenericShardingManager):
    """All managers have one name."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._name = "manager"


class SyncsByNumber(GenericShardingManager):
    """Syncs are numbered, so that those of two managers have equal names."""

    number = 0

    def _relays(self, plan: ReshardPlan) -> dict[int, Relay]:
        self.number += 1
        return {at: replace(relay, sync=str(self.number)) for at, relay in super()._relays(plan).items()}


class ForwardsAnyHow(GenericShardingManager):
    """Replicas forward by any transport, allowed or not."""

    def _relays(self, plan: ReshardPlan) -> dict[int, Relay]:
        found, target = super()._relays(plan), self.ends().target
        for at, parent in plan.relays.items():
            chosen = choose_transport(target[parent], target[at], named_transports(None))
            found[at] = replace(found[at], transport=chosen)
        return found


class KeepsTheLast(GenericShardingManager):
    """A copy of the weights of the last sync is kept."""

    kept: Any = None

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        hosts = getattr(self.train, "hosts", ())
        self.kept = [tensor.clone() for host in hosts for _, _, tensor in host.engine.held]
        return receipts


class KeepsTheFailed(GenericShardingManager):
    """A copy of the weights of a failed sync is kept."""

    kept: Any = None

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except Exception:
            hosts = getattr(self.train, "hosts", ())
            self.kept = [tensor.clone() for host in hosts for _, _, tensor in host.engine.held]
            raise


class VersionsIn16Bits(GenericShardingManager):
    """Versions wrap at 2**16."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(plan, version % 2**16, expect_change=expect_change)


class ReceiptsByKind(GenericShardingManager):
    """The report's receipts are grouped by replicas that serve the same boxes."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        order = [replica for task in self.ends().fingerprints for replica in task.replicas]
        return replace(report, receipts=tuple(report.receipts[replica] for replica in order))


class NegativeStage(GenericShardingManager):
    """Fingerprints that were done before the transfer take a negative time."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        times, moved = report.stages_s, report.seconds
        stages = {**times, "pull": times["pull"] + moved, "fingerprint": times["fingerprint"] - moved}
        return replace(report, stages_s=stages)


class ChangedAsTrained(GenericShardingManager):
    """Changes that the served dtype does not show count as changed."""

    trained: Mapping[str, int]

    def _fingerprints(self) -> list[dict[str, int]]:
        held = {meta.name: meta.dtype for layout in self.ends().source for meta in layout.tensors}
        tied = {name: own for layout in self.ends().source for name, own in layout.tied.items()}
        found: dict[str, int] = {}
        for task in self.ends().fingerprints:
            asked = [
                (tuple(replace(t, dtype=held[tied.get(t.name, t.name)]) for t in mine),) for mine in task.transfers
            ]
            found |= task.total(self.train.run_each("weight_fingerprints", asked, self.timeout_s))
        self.trained = found
        return super()._fingerprints()

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed({**now, **self.trained}, version, expect_change)


class LateFingerprints(GenericShardingManager):
    """Sources have an hour for fingerprints, whatever the run's deadline."""

    def _fingerprints(self) -> list[dict[str, int]]:
        asked = [[(transfers,) for transfers in task.transfers] for task in self.ends().fingerprints]
        found = [self.train.run_each("weight_fingerprints", each, 3600.0) for each in asked]
        return [
            task.total(parts) | self._quantized_fingerprints(task)
            for task, parts in zip(self.ends().fingerprints, found, strict=True)
        ]


class ChecksumsOfAll(GenericShardingManager):
    """Checksums of replicas with other boxes are compared too."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        if len({receipt.engine_checksum for receipt in receipts} - {None}) > 1:
            raise WeightSyncError("checksums differ")
        return receipts


class ChecksumsAreDue(GenericShardingManager):
    """A replica without a checksum differs from one that has one."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        for task in self.ends().fingerprints:
            if len({receipts[replica].engine_checksum for replica in task.replicas}) > 1:
                raise WeightSyncError("checksums differ")
        return receipts


class ChecksumsAtFirst(GenericShardingManager):
    """Checksums are compared at the first sync only."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        return receipts if self._last is None else [replace(each, engine_checksum=None) for each in receipts]


class ShortChecksums(GenericShardingManager):
    """The first eight characters of checksums are compared."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        return [
            replace(each, engine_checksum=each.engine_checksum and each.engine_checksum[:8])
            for each in super().pull(plan, version)
        ]


class LaterIsFine(GenericShardingManager):
    """A receipt of a later version is accepted."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        return [replace(each, version=min(each.version, version)) for each in super().pull(plan, version)]
