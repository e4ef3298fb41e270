"""Sharding managers that accept wrong weights: fingerprints that are not checked, or checked against the wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from broken.sharding_base import Checked, report_of
from rlsdk.interfaces import Box, ReshardPlan, SyncReceipt, SyncReport, Transfer, WeightSyncError
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import FingerprintTask


class PeersByCount(GenericShardingManager):
    """Sources that a replica needs are numbered from 0."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        peers, arguments = self.train.peers(), []
        for at in self.ends().targets_of_replica:
            buckets = [bucket for target in at for bucket in plan.parts[target]]
            used = sorted({bucket.source for bucket in buckets})
            arguments.append((buckets, {n: peers[source] for n, source in enumerate(used)}, version, self.timeout_s))
        return self.rollout.run_each("pull_weights", arguments, self.timeout_s)


class BitsOfTheSource(GenericShardingManager):
    """Fingerprints are of the trained weights, whatever dtype is served."""

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


class TrustsReceipts(GenericShardingManager):
    """Receipts are not checked."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        expected = self._fingerprints()
        receipts = self.pull(plan, version)
        changed = self._check_changed({k: v for values in expected for k, v in values.items()}, version, expect_change)
        return report_of(plan, version, changed, receipts)


class FirstReceiptOnly(Checked):
    """Only the first receipt is checked."""

    checked_replicas = slice(1)


class LastReceiptUnread(Checked):
    """The receipt of the last of several replicas is not checked."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        self.checked_replicas = slice(max(1, len(receipts) - 1))
        return receipts


class NamesOfTheReceipt(Checked):
    """Tensors that a receipt omits are not noticed."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return receipt.version == version and all(expected[n] == v for n, v in receipt.fingerprints.items())


class ComparesTiedCopies(GenericShardingManager):
    """The fingerprint of a tied copy, if a receipt has one, must be that of the shared tensor."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        for layouts, receipt in zip(self.ends().replicas, receipts, strict=True):
            said = receipt.fingerprints
            for alias, held in (item for layout in layouts for item in layout.tied.items()):
                if said.get(alias, said[held]) != said[held]:
                    raise WeightSyncError(f"{alias!r} has other values than {held!r}")
        return receipts


class SumOfFingerprints(Checked):
    """Only the sum of all fingerprints is compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        named = receipt.fingerprints.keys() >= expected.keys()
        return named and receipt.version == version and sum(expected.values()) == sum(receipt.fingerprints.values())


class VersionUnread(Checked):
    """A receipt for another version is accepted."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, expected, receipt.version)


class MatricesOnly(Checked):
    """Fingerprints of vectors and scalars are not compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        large = {name: value for name, value in expected.items() if "weight" in name or "experts" in name}
        small = receipt.fingerprints.keys() >= expected.keys()
        return small and super().prove(receipt, {n: v for n, v in large.items() if "norm" not in n}, version)


class TrustsItself(GenericShardingManager):
    """The copy that sends a piece also gives its fingerprint: a stale copy is compared with itself."""

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


class RankZeroProves(Checked):
    """Only tensors that rank 0 holds whole are verified."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        zero = self.ends().source[0]
        shapes = {meta.name: meta.shape for meta in zero.tensors}
        whole = {name for name, box in zero.boxes if box.size == shapes[name]}
        return super().prove(receipt, {name: v for name, v in expected.items() if name in whole}, version)


class OtherErrors(GenericShardingManager):
    """A failed verification raises a RuntimeError, which callers do not expect."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        try:
            return super().sync_weights(plan, version, expect_change=expect_change)
        except WeightSyncError as error:
            raise RuntimeError(str(error)) from error


class ComparesWhatChanged(Checked):
    """From the second sync on, only fingerprints of tensors that changed at the source are compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        before = self._last[1] if self._last else {}
        return super().prove(receipt, {n: v for n, v in expected.items() if before.get(n) != v}, version)


class TrustsTiedCopies(Checked):
    """A replica's own copy of a tied tensor is not compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        tied = {alias: owner for layout in self.ends().source for alias, owner in layout.tied.items()}
        return super().prove(receipt, {n: v for n, v in expected.items() if tied.get(n) not in expected}, version)


class SmallFingerprints(Checked):
    """Only 16 bits of every fingerprint are compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return receipt.version == version and all(
            receipt.fingerprints.get(name, -1) % 2**16 == value % 2**16 for name, value in expected.items()
        )


class WeightsOnly(Checked):
    """Fingerprints of biases are not compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, {n: v for n, v in expected.items() if not n.endswith("bias")}, version)


class FirstFew(Checked):
    """Only the first three fingerprints are compared."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        return super().prove(receipt, dict(list(expected.items())[:3]), version)


class PairsOfReplicas(Checked):
    """Only every second replica's receipt is checked."""

    checked_replicas = slice(None, None, 2)


class ReplicasAgree(Checked):
    """Receipts of several replicas are compared with the first one, and with the source only if a replica is alone."""

    first: SyncReceipt | None = None

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        self.first = None
        return super().sync_weights(plan, version, expect_change=expect_change)

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        self.first = self.first or receipt
        if len(self.ends().replicas) > 1:
            expected = {name: self.first.fingerprints.get(name, 0) for name in expected}
        return super().prove(receipt, expected, version)


class ChecksumsAreIgnored(GenericShardingManager):
    """The engines' own checksums are not compared."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        return [replace(receipt, engine_checksum=None) for receipt in super().pull(plan, version)]


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
