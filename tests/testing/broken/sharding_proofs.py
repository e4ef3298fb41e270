"""Sharding managers that accept wrong weights: fingerprints that are not checked, or checked against the wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from broken.defect import defect
from broken.sharding_base import Checked
from rlsdk.interfaces import ReshardPlan, SyncReceipt, WeightSyncError
from rlsdk.sharding import GenericShardingManager


@defect({"sync.verified": "replica 3 of 4 names another version", "sync.verified.first": "names another version"})
class VersionUnread(Checked):
    """A receipt for another version is accepted."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, expected, receipt.version)


@defect({"sync.verified.first": "replica 0 of unlike ones", "sync.sources": "mixtures accepted"})
class RankZeroProves(Checked):
    """Only tensors that rank 0 holds whole are verified."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        zero = self.ends().source[0]
        shapes = {meta.name: meta.shape for meta in zero.tensors}
        whole = {name for name, box in zero.boxes if box.size == shapes[name]}
        return super().prove(receipt, {name: v for name, v in expected.items() if name in whole}, version)


@defect({"sync.verified.each": "where another tensor was trained"})
class ComparesWhatChanged(Checked):
    """From the second sync on, only fingerprints of tensors that changed at the source are compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        before = self._last[1] if self._last else {}
        return super().prove(receipt, {n: v for n, v in expected.items() if before.get(n) != v}, version)


@defect({"sync.verified.each": "head.weight"})
class TrustsTiedCopies(Checked):
    """A replica's own copy of a tied tensor is not compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        tied = {alias: owner for layout in self.ends().source for alias, owner in layout.tied.items()}
        return super().prove(receipt, {n: v for n, v in expected.items() if tied.get(n) not in expected}, version)


@defect({"sync.verified": "replica 1 of 4 keeps all as it was"})
class PairsOfReplicas(Checked):
    """Only every second replica's receipt is checked."""

    checked_replicas = slice(None, None, 2)


@defect({"sync.checksums": "checksums aaab"})
class ChecksumsAreIgnored(GenericShardingManager):
    """The engines' own checksums are not compared."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        return [replace(receipt, engine_checksum=None) for receipt in super().pull(plan, version)]


@defect({"sync.names": "was not sent"})
class MoreIsWrong(GenericShardingManager):
    """A receipt that names more than the tensors of the layout is refused."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        for receipt, layouts in zip(receipts, self.ends().replicas, strict=True):
            metas = [meta for layout in layouts for meta in layout.tensors]
            known = {meta.name for meta in metas} | {meta.scales.name for meta in metas if meta.scales is not None}
            if more := sorted(set(receipt.fingerprints) - known):
                raise WeightSyncError(f"{more} was not sent")
        return receipts
