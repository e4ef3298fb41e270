"""Sharding managers of the sixth trial."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

from rlsdk.interfaces import ReshardPlan, SyncReport
from rlsdk.sharding import GenericShardingManager


class SecondsWithoutProof(GenericShardingManager):
    """The report's seconds are those in which weights moved."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, seconds=report.stages_s["pull"], stages_s={"pull": report.stages_s["pull"]})


class WaysByAlphabet(GenericShardingManager):
    """The report names transports in alphabetical order."""

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = super().sync_weights(plan, version, expect_change=expect_change)
        return replace(report, transports=tuple(sorted(report.transports)))


class OneNameForAll(GenericShardingManager):
    """All syncs of a manager have one name where replicas pass weights on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._syncs = repeat(0)  # type: ignore[assignment]
