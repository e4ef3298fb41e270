"""Sharding managers of a second blind trial, written without a look at what the requirements measure: of 13, they
caught 11.

Then every kind of change had to be let through where it may come, and the seconds of a report to be those that passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from broken.sharding_tools import Checked, Layouts, with_transfers
from rlsdk.interfaces import Bucket, ReshardPlan, SyncReceipt, SyncReport, Transfer, WeightSyncError
from rlsdk.sharding import GenericShardingManager


class SingleNumbersLost(GenericShardingManager):
    """Tensors of a single element are left out."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        shapes = {meta.name: meta.shape for layout in source for meta in layout.tensors}

        def keep(transfer: Transfer) -> Transfer | None:
            return None if all(size == 1 for size in shapes.get(transfer.name, (2,))) else transfer

        return with_transfers(super().plan(source, target), keep)


class SmallFingerprints(Checked):
    """Sixteen bits of every fingerprint are compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return receipt.version == version and all(
            receipt.fingerprints.get(name, -1) % 2**16 == value % 2**16 for name, value in expected.items()
        )


class WeightsOnly(Checked):
    """Fingerprints of biases are not compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, {n: v for n, v in expected.items() if not n.endswith("bias")}, version)


class FirstFew(Checked):
    """The first three fingerprints are compared: a sample."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, dict(list(expected.items())[:3]), version)


class ChangeIsAnError(GenericShardingManager):
    """Where no change is expected, a change is an error."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        last = self._last
        report = super().sync_weights(plan, version, expect_change=expect_change)
        if expect_change is False and last is not None and report.changed_tensors:
            raise WeightSyncError("weights changed that should not")
        return report


class SaysTheVersionBefore(GenericShardingManager):
    """The report names the version that was served before."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        before = self._last[0] if self._last else version
        return replace(super().sync_weights(plan, version, expect_change=expect_change), version=before)


class AllHasMoved(GenericShardingManager):
    """The report says that all bytes crossed a process."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, moved_bytes=report.num_bytes)


class BoundIsWhatMoved(GenericShardingManager):
    """The lower bound is what was moved."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, lower_bound_bytes=plan.num_bytes)


class WaysUnsaid(GenericShardingManager):
    """The report names no transport."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return replace(super().sync_weights(plan, version, expect_change=expect_change), transports=())


class LastRoundsTogether(GenericShardingManager):
    """The last two rounds of a part are taken as one: what is left is little."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[self._joined(list(part)) for part in plan.parts])

    def _joined(self, part: list[Bucket]) -> list[Bucket]:
        rounds = [list(found) for _, found in groupby(part, key=lambda bucket: bucket.round)]
        if len(rounds) < 2:
            return part
        early = rounds[-2][0].round
        return [bucket for found in rounds[:-1] for bucket in found] + [replace(b, round=early) for b in rounds[-1]]


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


class PairsOfReplicas(Checked):
    """Every second replica's receipt is checked."""

    checked_replicas = slice(None, None, 2)
