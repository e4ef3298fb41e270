"""Sharding managers that handle some layouts wrongly: tied names, other targets, places, transports, sizes."""

from __future__ import annotations

from dataclasses import replace

from broken.defect import defect
from broken.sharding_base import Layouts
from rlsdk.interfaces import LayoutError, ReshardPlan
from rlsdk.sharding import GenericShardingManager


@defect({"plan.refusals": "the last target's shape differs", "plan.served": "whole numbers at the last target"})
class FirstTargetCounts(GenericShardingManager):
    """The first target's shapes and dtypes are those of all targets."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        metas = {meta.name: meta for meta in target[0].tensors}
        same = [replace(w, tensors=tuple(metas.get(meta.name, meta) for meta in w.tensors)) for w in target]
        return super().plan(source, tuple(same))


@defect({"sync.tied": "which no source rank holds"})
class TiedOfTheFirst(GenericShardingManager):
    """Tied names are read from the first source rank."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        known = source if source[0].tied else tuple(replace(layout, tied={}) for layout in source)
        return super().plan(known, target)


@defect({"sync.tied": "is not served"})
class HeldNamesOnly(GenericShardingManager):
    """A tensor that is wanted only by its tied name counts as not served."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wanted = {meta.name for layout in target for meta in layout.tensors}
        for name in {meta.name for layout in source for meta in layout.tensors} - wanted:
            raise LayoutError(f"{name!r} is not served")
        return super().plan(source, target)


@defect({"plan.pure": "lists that planning changed"})
class SortsInPlace(GenericShardingManager):
    """A given list of sources is sorted in place."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        if isinstance(source, list):
            source.sort(key=lambda layout: layout.rank)
        return super().plan(source, target)


@defect({"plan.fields": "is apart from its replica's process"})
class ForwardsApart(GenericShardingManager):
    """Workers on another node than their replica forward like others."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        beside = tuple(replace(layout, is_apart=False) for layout in target)
        return replace(super().plan(source, target), relays=super().plan(source, beside).relays)


@defect({"plan.huge": "bytes"})
class CountsIn31Bits(GenericShardingManager):
    """Counts of bytes wrap at 2**31."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, num_bytes=plan.num_bytes % 2**31, moved_bytes=plan.moved_bytes % 2**31)


@defect({"sync.large": "more than four dimensions"})
class FourDimensions(GenericShardingManager):
    """Tensors have at most four dimensions."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        if deep := [meta.name for layout in source for meta in layout.tensors if len(meta.shape) > 4]:
            raise LayoutError(f"{deep[0]!r} has more than four dimensions")
        return super().plan(source, target)
