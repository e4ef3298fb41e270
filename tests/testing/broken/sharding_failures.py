"""Sharding managers that handle failures, deadlines, or several managers and replicas wrongly."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

from rlsdk.interfaces import DeadlineError, Peer, ReshardPlan, SyncReceipt, SyncReport, WeightSyncError, WorkerError
from rlsdk.sharding import GenericShardingManager


class RemembersTooSoon(GenericShardingManager):
    """Sent weights are recorded before they have arrived."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        now = {k: v for values in expected for k, v in values.items()}
        changed = self._check_changed(now, version, expect_change)
        report = super().sync_weights(plan, version, expect_change=False)
        return replace(report, changed_tensors=changed)


class OneMemoryForAll(GenericShardingManager):
    """The state of the last sync belongs to the class and is shared by all managers of the process."""

    seen: ClassVar[dict[str, Any]] = {}

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        self._last = self.seen.get("last", self._last)
        changed = super()._check_changed(now, version, expect_change)
        self.seen["last"] = self._last
        return changed


class FailuresAreLogged(GenericShardingManager):
    """A failed sync raises no error: it returns the previous report under the new version."""

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
    """A failed replica is ignored while another one works."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except WeightSyncError as error:
            told = [host.receipt for host in getattr(self.rollout, "hosts", ()) if host.receipt is not None]
            if "no memory left" not in str(error) or not told:
                raise
            return [told[0]] * len(self.ends().replicas)


class BusyForEver(GenericShardingManager):
    """After a failed sync the manager stays busy."""

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
    """Replicas get one hour, whatever the run's deadline."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        kept, self.timeout_s = self.timeout_s, 3600.0
        try:
            return super().pull(plan, version)
        finally:
            self.timeout_s = kept


class LeavesThreads(GenericShardingManager):
    """Every sync starts a monitoring thread that never ends."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().sync_weights(plan, version, expect_change=expect_change)


class OnePlaceEach(GenericShardingManager):
    """The n-th replica gets the n-th part of the plan: replicas with several ranks are not supported."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        peers = dict(enumerate(self.train.peers()))
        parts = list(plan.parts)
        arguments = [(parts[at], peers, version, self.timeout_s) for at in range(len(self.ends().replicas))]
        return self.rollout.run_each("pull_weights", arguments, self.timeout_s)


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


class PullsTwice(GenericShardingManager):
    """Every replica pulls twice."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        super().pull(plan, version)
        return super().pull(plan, version)


class LeavesDeadOut(GenericShardingManager):
    """A replica whose process has died is ignored; the report is that of the previous sync."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            self._report = super().sync_weights(plan, version, expect_change=expect_change)
        except WorkerError:
            if self._report is None:
                raise
        return replace(self._report, version=version)


class DeadlineOfAll(GenericShardingManager):
    """`timeout_s` limits a whole transfer, although weights arrive all the time."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        start = time.perf_counter()
        receipts = super().pull(plan, version)
        if time.perf_counter() - start > self.timeout_s:
            raise DeadlineError(f"version {version} did not arrive within {self.timeout_s:g} s")
        return receipts


class DeadSourceUnproven(GenericShardingManager):
    """If a source has died before it gave fingerprints, nothing is compared."""

    def _fingerprints(self) -> list[dict[str, int]]:
        try:
            return super()._fingerprints()
        except WorkerError:
            return [{} for _ in self.ends().fingerprints]

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, expect_change) if now else 0


class ReceiptsKept(GenericShardingManager):
    """Receipts of a sync that failed at a source are used again by its repetition, which transfers nothing."""

    kept: tuple[int, list[SyncReceipt]] | None = None

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        if self.kept is None or self.kept[0] != version:
            self.kept = (version, super().pull(plan, version))
        return self.kept[1]

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            report = super().sync_weights(plan, version, expect_change=expect_change)
        except WeightSyncError:
            self.kept = None
            raise
        self.kept = None
        return report


class EveryErrorIsASyncError(GenericShardingManager):
    """A dead process and a stage without progress are reported like weights that do not fit."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            return super().sync_weights(plan, version, expect_change=expect_change)
        except (WorkerError, DeadlineError) as error:
            raise WeightSyncError(f"the sync of version {version} failed: {error}") from error


class FirstPeers(GenericShardingManager):
    """Handles of the training ranks are requested once."""

    kept: Sequence[Peer] | None = None

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        self.kept = self.kept or list(self.train.peers())
        with patch.object(self.train, "peers", lambda: self.kept):
            return super().pull(plan, version)
