"""Sharding managers that are wrong about which weights changed, or which version is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broken.sharding_base import Layouts, with_transfers
from rlsdk.interfaces import ReshardPlan, SyncReceipt, SyncReport, Transfer, WeightSyncError
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import changed_tensors


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


class SaysNothing(GenericShardingManager):
    """`sync`, which the trainer calls, forgets what it was told to expect."""

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync(version)


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


class FirstElements(GenericShardingManager):
    """Of tensors beyond 64 Ki elements the end is taken for what it was."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def keep(transfer: Transfer) -> Transfer | None:
            box = transfer.box
            large = len(box.size) == 2 and box.size[1] * (box.offset[0] + box.size[0]) > 1 << 16 and box.offset[0] > 0
            return None if large else transfer

        return with_transfers(super().plan(source, target), keep)


class VersionsRise(GenericShardingManager):
    """A version below the last one is refused."""

    _highest = -1

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if version < self._highest:
            raise WeightSyncError(f"version {version} is older than {self._highest}")
        report = super().sync_weights(plan, version, expect_change=expect_change)
        self._highest = version
        return report


class ChangeIsAnError(GenericShardingManager):
    """Where no change is expected, a change is an error."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        last = self._last
        report = super().sync_weights(plan, version, expect_change=expect_change)
        if expect_change is False and last is not None and report.changed_tensors:
            raise WeightSyncError("weights changed that should not")
        return report


class FailedSyncCounts(GenericShardingManager):
    """A failed sync counts as the last one."""

    def pull(self, plan, version):
        try:
            return super().pull(plan, version)
        except BaseException:
            self._last = (version, {k: v for values in self._fingerprints() for k, v in values.items()})
            raise


class FalseIsNone(GenericShardingManager):
    """Expect_change=False is taken for None."""

    def sync_weights(self, plan, version, *, expect_change=None):
        return super().sync_weights(plan, version, expect_change=expect_change or None)
