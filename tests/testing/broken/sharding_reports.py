"""Sharding managers whose sync reports are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

from broken.defect import defect
from rlsdk.interfaces import ReshardPlan, SyncReport
from rlsdk.sharding import GenericShardingManager


@defect({"sync.large": "changed tensors", "sync.report": "changed tensors of the same again"})
class AllChanged(GenericShardingManager):
    """The report counts every tensor as changed."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, changed_tensors=report.num_tensors)


@defect({"sync.report.whole": "of those that passed"})
class SecondsWithoutProof(GenericShardingManager):
    """The report's seconds include only the transfer."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, seconds=report.stages_s["pull"], stages_s={"pull": report.stages_s["pull"]})


@defect({"sync.report.whole": "transports, of"})
class WaysByAlphabet(GenericShardingManager):
    """The report lists transports in alphabetical order."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, transports=tuple(sorted(report.transports)))


@defect({"sync.report.whole": "names of an earlier sync"})
class OneNameForAll(GenericShardingManager):
    """All syncs of a manager have the same name if replicas forward weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._syncs = repeat(0)  # type: ignore[assignment]


@defect({"sync.report": "transports"})
class WaysUnsaid(GenericShardingManager):
    """The report names no transport."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        return replace(super().sync_weights(plan, version, expect_change=expect_change), transports=())


@defect({"sync.report": "seconds, of those that passed"})
class SecondsAreMilliseconds(GenericShardingManager):
    """The report's time is in milliseconds."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, seconds=report.seconds * 1000)


@defect({"sync.quantized": "4 quantized tensors"})
class QuantizedByReplica(GenericShardingManager):
    """A quantized tensor is counted once for each replica."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        count = sum(len(task.quantized.tensors) * len(task.replicas) for task in self.ends().fingerprints)
        return replace(report, quantized_tensors=count)
