"""Sharding managers with one defect each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import ReshardPlan, SyncReport, WeightLayout
from rlsdk.sharding import GenericShardingManager


class BigBuckets(GenericShardingManager):
    """The bound on buckets is not read."""

    def __init__(self, train: Any, rollout: Any, *, bucket_bytes: int = 0) -> None:
        super().__init__(train, rollout)


class OneBucketShort(GenericShardingManager):
    """The last bucket of the first target is left out."""

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, parts=[list(plan.parts[0])[:-1], *plan.parts[1:]])


class TrustsReceipts(GenericShardingManager):
    """What replicas say they serve is taken for true."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        receipts = self.pull(plan, version)
        changed = self._check_changed({k: v for values in expected for k, v in values.items()}, version, expect_change)
        return SyncReport(
            version=version, num_tensors=len(plan.tensors), num_bytes=plan.num_bytes, moved_bytes=plan.moved_bytes,
            changed_tensors=changed, seconds=0.0, receipts=tuple(receipts),
        )  # fmt: skip


class ServesStale(GenericShardingManager):
    """Weights that did not change are no error."""

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        return super()._check_changed(now, version, False)
