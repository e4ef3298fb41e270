"""Sharding managers that handle failures, deadlines, or several managers and replicas wrongly."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, ClassVar

from broken.defect import defect
from rlsdk.interfaces import DeadlineError, ReshardPlan, SyncReceipt, SyncReport, WeightSyncError, WorkerError
from rlsdk.sharding import GenericShardingManager


@defect({"sync.failures": "no tensor changed", "sync.interrupted": "no tensor changed"})
class RemembersTooSoon(GenericShardingManager):
    """Sent weights are recorded before they have arrived."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        now = {k: v for values in expected for k, v in values.items()}
        changed = self._check_changed(now, version, expect_change)
        report = super().sync_weights(plan, version, expect_change=False)
        return replace(report, changed_tensors=changed)


@defect({"sync.calls": "calls without a deadline"})
class WaitsForEver(GenericShardingManager):
    """Calls of ranks have no deadline."""

    def ends(self) -> Any:
        if self._ends is None:
            for group in (self.train, self.rollout):
                group.run("weight_layout" if group is self.train else "target_layouts")
        return super().ends()


@defect({"sync.calls": "seconds of its deadline"})
class OwnDeadline(GenericShardingManager):
    """Replicas get one hour, whatever the run's deadline."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        kept, self.timeout_s = self.timeout_s, 3600.0
        try:
            return super().pull(plan, version)
        finally:
            self.timeout_s = kept


@defect({"sync.leaks": "left behind"})
class LeavesThreads(GenericShardingManager):
    """Every sync starts a monitoring thread that never ends."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().sync_weights(plan, version, expect_change=expect_change)


@defect({"sync.isolation": "elements came", "sync.interrupted": "elements came"})
class OnePlaceEach(GenericShardingManager):
    """The n-th replica gets the n-th part of the plan: replicas with several ranks are not supported."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        peers = dict(enumerate(self.train.peers()))
        parts = list(plan.parts)
        arguments = [(parts[at], peers, version, self.timeout_s) for at in range(len(self.ends().replicas))]
        return self.rollout.run_each("pull_weights", arguments, self.timeout_s)


@defect({"sync.managers": ""})
class SharedPoolOfTheClass(GenericShardingManager):
    """Managers with equal numbers of ranks share the first one's state of its groups."""

    _shared: ClassVar[dict] = {}

    def ends(self):
        key = (self.train.backend, self.rollout.backend, len(self.train.peers()), len(self.rollout.peers()))
        if self._ends is None:
            self._ends = self._shared.get(key)
        found = super().ends()
        if not self._shared:
            self._shared[key] = found
        return found


@defect({"sync.calls": "replica 0 pulled 2 times"})
class PullsTwice(GenericShardingManager):
    """Every replica pulls twice."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        super().pull(plan, version)
        return super().pull(plan, version)


@defect({"sync.slow": "did not arrive within"})
class DeadlineOfAll(GenericShardingManager):
    """`timeout_s` limits a whole transfer, although weights arrive all the time."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        start = time.perf_counter()
        receipts = super().pull(plan, version)
        if time.perf_counter() - start > self.timeout_s:
            raise DeadlineError(f"version {version} did not arrive within {self.timeout_s:g} s")
        return receipts


@defect({"sync.failures": "dies: WeightSyncError"})
class EveryErrorIsASyncError(GenericShardingManager):
    """A dead process and a stage without progress are reported like weights that do not fit."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            return super().sync_weights(plan, version, expect_change=expect_change)
        except (WorkerError, DeadlineError) as error:
            raise WeightSyncError(f"the sync of version {version} failed: {error}") from error
