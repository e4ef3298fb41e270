"""Sharding managers that were thought of when the suite stood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broken.sharding_plans import once_a_round
from broken.sharding_tools import Checked, Layouts, with_buckets, with_transfers
from rlsdk.interfaces import (
    DTYPE_BYTES,
    Bucket,
    ReshardPlan,
    SyncReceipt,
    SyncReport,
    Transfer,
    WeightSyncError,
)
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import changed_tensors


class TiedUnderOwnName(GenericShardingManager):
    """A tied tensor travels under the name that the source holds it by."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        tied = {name: own for layout in source for name, own in layout.tied.items()}
        held = {meta.name for layout in source for meta in layout.tensors}

        def rename(transfer: Transfer) -> Transfer:
            return transfer if transfer.name in held else replace(transfer, name=tied[transfer.name])

        return with_transfers(super().plan(source, target), rename)


class PartsByRank(GenericShardingManager):
    """Parts of a plan stand by the rank of the target, not by its place in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        order = sorted(range(len(target)), key=lambda at: target[at].rank)
        parts = [[replace(bucket, target=n) for bucket in plan.parts[at]] for n, at in enumerate(order)]
        return replace(plan, parts=parts)


class PullsTwice(GenericShardingManager):
    """Every replica pulls twice, to be sure."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        super().pull(plan, version)
        return super().pull(plan, version)


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


class OnlyTheLastPlan(GenericShardingManager):
    """What was planned last is carried out, whatever plan is given."""

    _planned: ReshardPlan | None = None

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        self._planned = super().plan(source, target)
        return self._planned

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(self._planned or plan, version, expect_change=expect_change)


class PlansOfItsOwn(GenericShardingManager):
    """A plan is known by its identity: one that came from elsewhere is none."""

    def __init__(self, *groups: Any, **arguments: Any) -> None:
        super().__init__(*groups, **arguments)
        self._known: dict[int, ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        self._known[id(plan)] = plan
        return plan

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return super().sync_weights(self._known[id(plan)], version, expect_change=expect_change)


class RankZeroProves(Checked):
    """What rank 0 holds whole is proven, and nothing else."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        zero = self.ends().source[0]
        shapes = {meta.name: meta.shape for meta in zero.tensors}
        whole = {name for name, box in zero.boxes if box.size == shapes[name]}
        return super().prove(receipt, {name: v for name, v in expected.items() if name in whole}, version)


class FirstElements(GenericShardingManager):
    """Of tensors beyond 64 Ki elements the end is taken for what it was."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def keep(transfer: Transfer) -> Transfer | None:
            box = transfer.box
            large = len(box.size) == 2 and box.size[1] * (box.offset[0] + box.size[0]) > 1 << 16 and box.offset[0] > 0
            return None if large else transfer

        return with_transfers(super().plan(source, target), keep)


class RankIsIndex(GenericShardingManager):
    """Sources are named by their rank, not by their place in the list."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        parts = [[replace(bucket, source=source[bucket.source].rank) for bucket in part] for part in plan.parts]
        return replace(plan, parts=[once_a_round(part) for part in parts])


class OrderOfItsOwn(GenericShardingManager):
    """Within a bucket tensors stand by name, from the last to the first, in whatever order the target takes them."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def turned(bucket: Bucket) -> Bucket:
            return replace(bucket, transfers=tuple(sorted(bucket.transfers, key=lambda t: t.name, reverse=True)))

        return with_buckets(super().plan(source, target), turned)


class OneTransport(GenericShardingManager):
    """What reaches between the first two ranks is taken for all."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        chosen = plan.buckets[0].transport
        return with_buckets(plan, lambda bucket: replace(bucket, transport=chosen))


class BytesOfTheFirst(GenericShardingManager):
    """All tensors have elements as long as the first one's."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        width = DTYPE_BYTES[plan.buckets[0].transfers[0].dtype]
        return with_transfers(plan, lambda transfer: replace(transfer, num_bytes=transfer.box.numel * width))


class VersionsRise(GenericShardingManager):
    """A version below the last one is refused."""

    _highest = -1

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        if version < self._highest:
            raise WeightSyncError(f"version {version} is older than {self._highest}")
        report = super().sync_weights(plan, version, expect_change=expect_change)
        self._highest = version
        return report


class OtherErrors(GenericShardingManager):
    """What is wrong is a RuntimeError, which nobody waits for."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            return super().sync_weights(plan, version, expect_change=expect_change)
        except WeightSyncError as error:
            raise RuntimeError(str(error)) from error
