"""Sharding managers that are wrong where one replica hands the weights on to the next."""

from __future__ import annotations

from dataclasses import replace

from broken.sharding_base import Layouts
from rlsdk.interfaces import ReshardPlan, SyncReceipt
from rlsdk.sharding import GenericShardingManager


class FirstAnswers(GenericShardingManager):
    """Of a chain the first answers for all: what replicas behind it serve is not looked at."""

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        receipts = super().pull(plan, version)
        for target in plan.relays:
            first = target
            while first in plan.relays:
                first = plan.relays[first]
            receipts[target] = receipts[first]
        return receipts


class LoadWithoutChains(GenericShardingManager):
    """What sources send where replicas forward is said to be what they would send without."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, relayed_load=plan.source_load)


class ForwardsToUnlike(GenericShardingManager):
    """Whatever the last target needs, the first forwards to it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        is_unlike = target[0].boxes != target[-1].boxes
        return replace(plan, relays={len(target) - 1: 0}) if is_unlike and not plan.relays else plan
