"""Sharding managers that fail badly: failures, deadlines, replicas, reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import (
    ReshardPlan,
    SyncReceipt,
    SyncReport,
    Transfer,
    WeightSyncError,
)
from rlsdk.sharding import GenericShardingManager


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
