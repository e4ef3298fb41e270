"""Sharding managers that are wrong where one replica hands the weights on to the next."""

from __future__ import annotations

from dataclasses import replace

from broken.sharding_base import Layouts
from rlsdk.interfaces import ReshardPlan, SyncReceipt
from rlsdk.sharding import GenericShardingManager


class FirstAnswers(GenericShardingManager):
    """In a chain only the first replica is checked."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        for target in plan.relays:
            first = target
            while first in plan.relays:
                first = plan.relays[first]
            receipts[target] = receipts[first]
        return receipts


class LoadWithoutChains(GenericShardingManager):
    """The reported load of sources ignores that replicas forward."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, relayed_load=plan.source_load)


class ForwardsToUnlike(GenericShardingManager):
    """The first target forwards to the last one, even if their needs differ."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        is_unlike = target[0].boxes != target[-1].boxes
        return replace(plan, relays={len(target) - 1: 0}) if is_unlike and not plan.relays else plan
