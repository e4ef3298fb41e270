"""Sharding managers whose sync reports are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

from rlsdk.interfaces import ReshardPlan, SyncReport
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import changed_tensors


class AllChanged(GenericShardingManager):
    """The report counts every tensor as changed."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, changed_tensors=report.num_tensors)


class ReceiptsSorted(GenericShardingManager):
    """The report's receipts are ordered by received bytes, not by replica."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, receipts=tuple(sorted(report.receipts, key=lambda r: r.num_bytes)))


class BytesOfOneReplica(GenericShardingManager):
    """The report counts the bytes of the first replica."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, num_bytes=report.receipts[0].num_bytes)


class ChangedSinceTheFirst(GenericShardingManager):
    """Changed tensors are counted relative to the first sync."""

    first = None

    def _check_changed(self, now, version, expect_change):
        super()._check_changed(now, version, expect_change)
        if self.first is None:
            self.first = now
            return len(now)
        return changed_tensors(now, self.first)


class SecondsWithoutProof(GenericShardingManager):
    """The report's seconds include only the transfer."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, seconds=report.stages_s["pull"], stages_s={"pull": report.stages_s["pull"]})


class WaysByAlphabet(GenericShardingManager):
    """The report lists transports in alphabetical order."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, transports=tuple(sorted(report.transports)))


class OneNameForAll(GenericShardingManager):
    """All syncs of a manager have the same name if replicas forward weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._syncs = repeat(0)  # type: ignore[assignment]


class SaysTheVersionBefore(GenericShardingManager):
    """The report names the previous version."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        before = self._last[0] if self._last else version
        return replace(super().sync_weights(plan, version, expect_change=expect_change), version=before)


class AllHasMoved(GenericShardingManager):
    """The report says that all bytes crossed a process boundary."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, moved_bytes=report.num_bytes)


class WaysUnsaid(GenericShardingManager):
    """The report names no transport."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return replace(super().sync_weights(plan, version, expect_change=expect_change), transports=())


class CountsTransfers(GenericShardingManager):
    """The report counts transfers as tensors."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, num_tensors=sum(len(bucket.transfers) for bucket in plan.buckets))


class SecondsAreMilliseconds(GenericShardingManager):
    """The report's time is in milliseconds."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, seconds=report.seconds * 1000)


class QuantizedByReplica(GenericShardingManager):
    """A quantized tensor is counted once for each replica."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        count = sum(len(task.quantized.tensors) * len(task.replicas) for task in self.ends().fingerprints)
        return replace(report, quantized_tensors=count)
