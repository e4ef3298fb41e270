"""Sharding managers that are wrong from sync to sync: other plans, retries, names, what they keep, what they report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from broken.defect import defect
from rlsdk.interfaces import Relay, ReshardPlan, SyncReceipt, SyncReport, WeightSyncError
from rlsdk.sharding import GenericShardingManager


@defect({"sync.given_plan": "plans that were not executed"})
class PlanOfItsOwn(GenericShardingManager):
    """The manager's own plan for its groups is executed, not the given one."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        own = self.plan(self.ends().source, self.ends().target)
        return super().sync_weights(own, version, expect_change=expect_change)


@defect({"sync.failures.once": "there are no layouts"})
class AsksOnce(GenericShardingManager):
    """A request for layouts that failed is not repeated."""

    asked = False

    def ends(self) -> Any:
        if self._ends is None and self.asked:
            raise WeightSyncError("there are no layouts")
        self.asked = True
        return super().ends()


@defect({"sync.chains": "names of a manager"})
class OneNameForManagers(GenericShardingManager):
    """All managers have one name."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._name = "manager"


@defect({"sync.chains": "names of a sync"})
class SyncsByNumber(GenericShardingManager):
    """Syncs are numbered, so that those of two managers have equal names."""

    number = 0

    def _relays(self, plan: ReshardPlan) -> dict[int, Relay]:
        self.number += 1
        return {at: replace(relay, sync=str(self.number)) for at, relay in super()._relays(plan).items()}


@defect({"sync.again": "a very high version"})
class VersionsIn16Bits(GenericShardingManager):
    """Versions wrap at 2**16."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(plan, version % 2**16, expect_change=expect_change)


@defect({"sync.checksums": "abc of unlike replicas"})
class ChecksumsOfAll(GenericShardingManager):
    """Checksums of replicas with other boxes are compared too."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        if len({receipt.engine_checksum for receipt in receipts} - {None}) > 1:
            raise WeightSyncError("checksums differ")
        return receipts


@defect({"sync.checksums": "checksums aaba"})
class ChecksumsAtFirst(GenericShardingManager):
    """Checksums are compared at the first sync only."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        return receipts if self._last is None else [replace(each, engine_checksum=None) for each in receipts]


@defect({"sync.verified": "names a later version"})
class LaterIsFine(GenericShardingManager):
    """A receipt of a later version is accepted."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        return [replace(each, version=min(each.version, version)) for each in super().pull(plan, version)]
