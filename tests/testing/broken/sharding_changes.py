"""Sharding managers that are wrong about which weights changed, or which version is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from broken.sharding_base import Layouts, with_transfers
from rlsdk.interfaces import ReshardPlan, SyncReceipt, SyncReport, Transfer, WeightSyncError
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import changed_tensors


class ServesStale(GenericShardingManager):
    """Unchanged weights are no error."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, False)


class ChangeByOrder(GenericShardingManager):
    """A change is always expected."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, self._last is not None)


class OrderUnread(GenericShardingManager):
    """Whether a change is expected depends only on the version, not on the trainer."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, None)


class FirstTensorChanged(GenericShardingManager):
    """Only the first tensor is checked for changes."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else {}
        first = next(iter(now))
        if before.get(first) == now[first]:
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


class SumChanged(GenericShardingManager):
    """Only the sum of all fingerprints is checked for changes."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else {}
        if before and sum(before.values()) == sum(now.values()):
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


class HighestVersion(GenericShardingManager):
    """A change is expected only for versions above the highest so far."""

    _highest = -1

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        if expect_change is None:
            expect_change = self._last is not None and version > self._highest
        self._highest = max(self._highest, version)
        return super()._check_changed(now, version, expect_change)


class NoVersionZero(GenericShardingManager):
    """Version 0 is treated as no version."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        if self._last is not None and not self._last[0]:
            self._last = None
        return super()._check_changed(now, version, expect_change)


class ForgetsRefusals(GenericShardingManager):
    """A refused version counts as the last one, so that a repeated sync is accepted."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        try:
            return super()._check_changed(now, version, expect_change)
        except WeightSyncError:
            self._last = (version, now)
            raise


class LessWhenUnchanged(GenericShardingManager):
    """If no change is expected, nothing is sent."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if expect_change is False and self._report is not None:
            return replace(self._report, version=version)
        self._report = super().sync_weights(plan, version, expect_change=expect_change)
        return self._report


class SameVersionIsServed(GenericShardingManager):
    """A version that is already served is not sent again."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if self._report is not None and self._report.version == version and not expect_change:
            return self._report
        self._report = super().sync_weights(plan, version, expect_change=expect_change)
        return self._report


class SameWeightsAreServed(GenericShardingManager):
    """Weights that have not changed since the last sync are not sent again."""

    _report: SyncReport | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = {k: v for values in self._fingerprints() for k, v in values.items()}
        if self._last is not None and self._report is not None and changed_tensors(expected, self._last[1]) == 0:
            self._check_changed(expected, version, expect_change)
            return replace(self._report, version=version)
        self._report = super().sync_weights(plan, version, expect_change=expect_change)
        return self._report


class ProofOfTheVersion(GenericShardingManager):
    """Fingerprints are cached by version."""

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
    """`sync`, which the trainer calls, ignores `expect_change`."""

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync(version)


class MostMustChange(GenericShardingManager):
    """Few changed tensors count as no change."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else None
        if before is not None and changed_tensors(now, before) < len(now) / 2:
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


class FailureIsAFreshStart(GenericShardingManager):
    """After a failed sync, the previous one is forgotten."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        try:
            return super().pull(plan, version)
        except Exception:
            self._last = None
            raise


class FirstElements(GenericShardingManager):
    """The end of tensors beyond 64 Ki elements is not compared."""

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
    """If no change is expected, a change is an error."""

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
    """`expect_change=False` is treated as None."""

    def sync_weights(self, plan, version, *, expect_change=None):
        return super().sync_weights(plan, version, expect_change=expect_change or None)


class ScalesAreNoChange(GenericShardingManager):
    """Of tensors that replicas quantize, only float8 values are compared with those of the last sync, not scales."""

    def _now(self, expected: Sequence[Mapping[str, int]]) -> dict[str, int]:
        now = {name: value for values in expected for name, value in values.items()}
        for task in self.ends().fingerprints:
            for scales in task.quantized.scales.values():
                now.pop(scales, None)
        return now


class WeightsOfLongAgo(GenericShardingManager):
    """Weights that equal those of any earlier sync count as unchanged, as after a return to an older checkpoint."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        known = vars(self).setdefault("known", [])
        if expect_change is not False and self._last and version > self._last[0] and now in known:
            raise WeightSyncError(f"no tensor changed before version {version}")
        found = super()._check_changed(now, version, expect_change)
        known.append(dict(now))
        return found


class ForgetsUnexpected(GenericShardingManager):
    """A sync without an expected change is not remembered as the last one."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = self._last
        found = super()._check_changed(now, version, expect_change)
        if expect_change is False and before is not None:
            self._last = before
        return found


class TrustsTheUnchanged(GenericShardingManager):
    """Replicas are believed if they return to a lower version, whose weights they once served."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            report = super().sync_weights(plan, version, expect_change=expect_change)
        except WeightSyncError:
            if version >= vars(self).get("highest", version) or self._last is None:
                raise
            return replace(vars(self)["report"], version=version)
        vars(self).update(highest=max(version, vars(self).get("highest", version)), report=report)
        return report
