"""Sharding managers that take what is served for right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from broken.sharding_tools import Checked, report_of
from rlsdk.interfaces import (
    Box,
    ReshardPlan,
    SyncReceipt,
    SyncReport,
    Transfer,
)
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import FingerprintTask


class TrustsReceipts(GenericShardingManager):
    """What replicas say they serve is taken for true."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        receipts = self.pull(plan, version)
        changed = self._check_changed({k: v for values in expected for k, v in values.items()}, version, expect_change)
        return report_of(plan, version, changed, receipts)


class FirstReceiptOnly(Checked):
    """Replicas are alike: the receipt of the first is checked."""

    checked_replicas = slice(1)


class LastReceiptUnread(Checked):
    """The receipt of the last of several replicas is not checked."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        self.checked_replicas = slice(max(1, len(receipts) - 1))
        return receipts


class NamesOfTheReceipt(Checked):
    """What a receipt does not name is not missed."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return receipt.version == version and all(expected[n] == v for n, v in receipt.fingerprints.items())


class SumOfFingerprints(Checked):
    """All fingerprints are added up and compared as one number."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        named = receipt.fingerprints.keys() >= expected.keys()
        return named and receipt.version == version and sum(expected.values()) == sum(receipt.fingerprints.values())


class VersionUnread(Checked):
    """A receipt for another version will do."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, expected, receipt.version)


class MatricesOnly(Checked):
    """Fingerprints of vectors and numbers are not compared: rounding would differ."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        large = {name: value for name, value in expected.items() if "weight" in name or "experts" in name}
        small = receipt.fingerprints.keys() >= expected.keys()
        return small and super().prove(receipt, {n: v for n, v in large.items() if "norm" not in n}, version)


class TrustsItself(GenericShardingManager):
    """The copy that gives a piece gives its fingerprint as well: one that is stale is held to its own numbers."""

    def _fingerprints(self) -> list[dict[str, int]]:
        plan = self.plan(self.ends().source, self.ends().target)
        found = []
        for task in self.ends().fingerprints:
            first = task.replicas[0]
            targets = self.ends().targets_of_replica[first]
            dtypes = {t.name: t.dtype for mine in task.transfers for t in mine}
            mine: list[list[Transfer]] = [[] for _ in self.ends().source]
            seen: set[tuple[str, Box]] = set()
            for target in targets:
                for bucket in plan.parts[target]:
                    fresh = [t for t in bucket.transfers if (t.name, t.box) not in seen]
                    seen |= {(t.name, t.box) for t in fresh}
                    mine[bucket.source] += [replace(t, dtype=dtypes[t.name]) for t in fresh]
            if len(targets) > 1:
                return super()._fingerprints()
            same = FingerprintTask(replicas=task.replicas, transfers=tuple(map(tuple, mine)))
            arguments = [(transfers,) for transfers in same.transfers]
            found.append(same.total(self.train.run_each("weight_fingerprints", arguments, self.timeout_s)))
        return found
