"""Base classes and functions of broken sharding managers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rlsdk.interfaces import Bucket, ReshardPlan, SyncReceipt, SyncReport, WeightLayout, WeightSyncError
from rlsdk.sharding import GenericShardingManager

Layouts = Sequence[WeightLayout]


def with_buckets(plan: ReshardPlan, change: Callable[[Bucket], Bucket | None]) -> ReshardPlan:
    """The plan with other buckets, or fewer."""
    parts = [[new for bucket in part if (new := change(bucket)) is not None] for part in plan.parts]
    return replace(plan, parts=parts)


def report_of(plan: ReshardPlan, version: int, changed: int, receipts: Sequence[SyncReceipt]) -> SyncReport:
    """The report of a sync that brought what the plan says."""
    return SyncReport(
        version=version, num_tensors=len(plan.tensors), num_bytes=plan.num_bytes, moved_bytes=plan.moved_bytes,
        lower_bound_bytes=plan.lower_bound_bytes, changed_tensors=changed, seconds=0.001, receipts=tuple(receipts),
        transports=tuple({bucket.transport for bucket in plan.buckets}),
    )  # fmt: skip


class Checked(GenericShardingManager):
    """A manager with its own check of receipts: `prove`, for each replica that `checked_replicas` names."""

    checked_replicas: slice = slice(None)

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        names_all = receipt.fingerprints.keys() >= expected.keys()
        return (
            receipt.version == version and names_all and all(receipt.fingerprints[n] == v for n, v in expected.items())
        )

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        with ThreadPoolExecutor(1) as pool:
            fingerprints = pool.submit(self._fingerprints)
            receipts = self.pull(plan, version)
            expected = fingerprints.result()
        for task, values in zip(self.ends().fingerprints, expected, strict=True):
            for replica in task.replicas:
                receipt = receipts[replica]
                if replica in range(len(receipts))[self.checked_replicas] and not self.prove(receipt, values, version):
                    raise WeightSyncError(f"replica {replica} does not serve version {version}")
        changed = self._check_changed({k: v for values in expected for k, v in values.items()}, version, expect_change)
        return report_of(plan, version, changed, receipts)
