"""Sharding managers that are wrong about which weights changed, or which version is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broken.defect import defect
from rlsdk.interfaces import SyncReport
from rlsdk.sharding import GenericShardingManager


@defect({"sync.changed": "two tensors changed places"})
class SumChanged(GenericShardingManager):
    """Only the sum of all fingerprints is checked for changes."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = dict(self._last[1]) if self._last else {}
        if before and sum(before.values()) == sum(now.values()):
            super()._check_changed(before, version, expect_change)
        return super()._check_changed(now, version, False)


@defect({"sync.unchanged": "version 1 with the weights of version 0"})
class NoVersionZero(GenericShardingManager):
    """Version 0 is treated as no version."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        if self._last is not None and not self._last[0]:
            self._last = None
        return super()._check_changed(now, version, expect_change)


@defect({"sync.again": "no tensor changed", "sync.unchanged": "the same version, though a change is expected"})
class SaysNothing(GenericShardingManager):
    """`sync`, which the trainer calls, ignores `expect_change`."""

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync(version)


@defect({"sync.unchanged": "asked again after"})
class FailedSyncCounts(GenericShardingManager):
    """A failed sync counts as the last one."""

    def pull(self, plan, version):
        try:
            return super().pull(plan, version)
        except BaseException:
            self._last = (version, {k: v for values in self._fingerprints() for k, v in values.items()})
            raise


@defect({"sync.changed": "no change expected"})
class FalseIsNone(GenericShardingManager):
    """`expect_change=False` is treated as None."""

    def sync_weights(self, plan, version, *, expect_change=None):
        return super().sync_weights(plan, version, expect_change=expect_change or None)


@defect({"sync.quantized": "doubled"})
class ScalesAreNoChange(GenericShardingManager):
    """Of tensors that replicas quantize, only float8 values are compared with those of the last sync, not scales."""

    def _now(self, expected: Sequence[Mapping[str, int]]) -> dict[str, int]:
        now = {name: value for values in expected for name, value in values.items()}
        for task in self.ends().fingerprints:
            for scales in task.quantized.scales.values():
                now.pop(scales, None)
        return now


@defect({"sync.random_calls": "wrong"})
class ForgetsUnexpected(GenericShardingManager):
    """A sync without an expected change is not remembered as the last one."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        before = self._last
        found = super()._check_changed(now, version, expect_change)
        if expect_change is False and before is not None:
            self._last = before
        return found
