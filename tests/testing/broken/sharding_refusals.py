"""Sharding managers that plan what they should refuse, or refuse what they should plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from broken.defect import defect
from broken.sharding_base import Layouts
from rlsdk.interfaces import ReshardPlan
from rlsdk.sharding import GenericShardingManager


@defect({"plan.near": "which no source rank holds", "plan.order": "which no source rank holds"})
class KnowsNoTies(GenericShardingManager):
    """A tensor that the sources hold under its other tied name is unknown."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return super().plan(tuple(replace(layout, tied={}) for layout in source), target)


@defect({"plan.transports": "transports that were not allowed"})
class TakesAnyTransport(GenericShardingManager):
    """The allowed transports are ignored."""

    def __init__(self, train: Any, rollout: Any, *, transports: Any = None, **others: Any) -> None:
        super().__init__(train, rollout, **others)


@defect({"plan.refusals": "a tied name that one rank lists"})
class TiedNamesOfAny(GenericShardingManager):
    """A tied name counts for all ranks if any of them lists it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        tied = {name: shared for layout in source for name, shared in layout.tied.items()}
        return super().plan(tuple(replace(layout, tied=tied) for layout in source), target)
