"""Sharding managers that handle some layouts wrongly: tied names, other targets, places, transports, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from broken.sharding_base import Layouts, with_buckets
from rlsdk.interfaces import Box, LayoutError, ReshardPlan, WeightLayout
from rlsdk.sharding import GenericShardingManager


class UnknownLeftOut(GenericShardingManager):
    """A wanted tensor that no source holds is omitted from the plan."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        held = {name for layout in source for name in (*layout.tied, *(meta.name for meta in layout.tensors))}
        known = [
            replace(
                layout,
                tensors=tuple(meta for meta in layout.tensors if meta.name in held),
                boxes=tuple(entry for entry in layout.boxes if entry[0] in held),
            )
            for layout in target
        ]
        return super().plan(source, tuple(known))


class FirstTargetCounts(GenericShardingManager):
    """The first target's shapes and dtypes are those of all targets."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        metas = {meta.name: meta for meta in target[0].tensors}
        same = [replace(w, tensors=tuple(metas.get(meta.name, meta) for meta in w.tensors)) for w in target]
        return super().plan(source, tuple(same))


class OneDtypeOfTargets(GenericShardingManager):
    """All targets must want a tensor in one dtype, even if it is sent to all of them in one."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wanted: dict[str, str] = {}
        for meta in (meta for layout in target for meta in layout.tensors):
            if wanted.setdefault(meta.name, meta.dtype) != meta.dtype:
                raise LayoutError(f"{meta.name!r}: targets want {wanted[meta.name]} and {meta.dtype}")
        return super().plan(source, target)


class ColumnsAreVectors(GenericShardingManager):
    """Dimensions of length 1 at the end of a shape do not count."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return super().plan(source, tuple(map(self._flat, target)))

    def _flat(self, layout: WeightLayout) -> WeightLayout:
        long = {meta.name for meta in layout.tensors if len(meta.shape) == 2 and meta.shape[-1] == 1}
        return replace(
            layout,
            tensors=tuple(replace(m, shape=m.shape[:1]) if m.name in long else m for m in layout.tensors),
            boxes=tuple((n, Box(b.offset[:1], b.size[:1]) if n in long else b) for n, b in layout.boxes),
        )


class ClipsBoxes(GenericShardingManager):
    """Boxes that end beyond their tensor are cut to it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return super().plan(source, tuple(map(self._clipped, target)))

    def _clipped(self, layout: WeightLayout) -> WeightLayout:
        shapes = {meta.name: meta.shape for meta in layout.tensors}

        def clipped(name: str, box: Box) -> Box:
            fits = len(box.size) == len(shapes[name])
            return (box.intersect(Box.whole(shapes[name])) or box) if fits else box

        return replace(layout, boxes=tuple((name, clipped(name, box)) for name, box in layout.boxes))


class TiedOfTheFirst(GenericShardingManager):
    """Tied names are read from the first source rank."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        known = source if source[0].tied else tuple(replace(layout, tied={}) for layout in source)
        return super().plan(known, target)


class OneOtherName(GenericShardingManager):
    """A tensor has at most one tied name: the last one."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        def one(layout: WeightLayout) -> WeightLayout:
            names = {held: name for name, held in layout.tied.items()}
            return replace(layout, tied={name: held for held, name in names.items()})

        return super().plan(tuple(map(one, source)), target)


class HeldNamesOnly(GenericShardingManager):
    """A tensor that is wanted only by its tied name counts as not served."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wanted = {meta.name for layout in target for meta in layout.tensors}
        for name in {meta.name for layout in source for meta in layout.tensors} - wanted:
            raise LayoutError(f"{name!r} is not served")
        return super().plan(source, target)


class TuplesOnly(GenericShardingManager):
    """Layouts in a list are a TypeError."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        if not isinstance(source, tuple):
            raise TypeError(f"expected a tuple of layouts, not a {type(source).__name__}")
        return super().plan(source, target)


class PlansByIdentity(GenericShardingManager):
    """Plans are cached by the identity of the lists of layouts."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.planned: dict[tuple[int, int], ReshardPlan] = {}

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        key = id(source), id(target)
        if key not in self.planned:
            self.planned[key] = super().plan(source, target)
        return self.planned[key]


class SortsInPlace(GenericShardingManager):
    """A given list of sources is sorted in place."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        if isinstance(source, list):
            source.sort(key=lambda layout: layout.rank)
        return super().plan(source, target)


class DevicesByName(GenericShardingManager):
    """Devices of one name are one device, even on two nodes."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        nodes = {layout.device: layout.node for layout in (*source, *target) if layout.device != "cpu"}

        def moved(layouts: Layouts) -> Layouts:
            return tuple(replace(layout, node=nodes.get(layout.device, layout.node)) for layout in layouts)

        return super().plan(moved(source), moved(target))


class ForwardsApart(GenericShardingManager):
    """Workers on another node than their replica forward like others."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        beside = tuple(replace(layout, is_apart=False) for layout in target)
        return replace(super().plan(source, target), relays=super().plan(source, beside).relays)


class PrefersInProcess(GenericShardingManager):
    """Within a process weights go directly, whatever transport is preferred."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan, allowed = super().plan(source, target), [transport.name for transport in self.plans.transports]
        return with_buckets(
            plan,
            lambda bucket: (
                replace(bucket, transport="in_process")
                if "in_process" in allowed and source[bucket.source].process == target[bucket.target].process
                else bucket
            ),
        )


class FallsBack(GenericShardingManager):
    """If no allowed transport reaches a target, another one is used."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        try:
            return super().plan(source, target)
        except LayoutError as error:
            if "no transport" not in str(error):
                raise
            any_transport = GenericShardingManager(self.train, self.rollout, bucket_bytes=self.bucket_bytes)
            return any_transport.plan(source, target)


class WholeFromTheFirst(GenericShardingManager):
    """Tensors that every source holds whole come from the first one."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        if {layout.process for layout in source} & {layout.process for layout in target} or self._spread(source):
            return super().plan(source, target)
        shapes = {meta.name: meta.shape for layout in source for meta in layout.tensors}
        whole = set.intersection(*({n for n, box in layout.boxes if box.size == shapes[n]} for layout in source))
        others = [
            replace(layout, boxes=tuple(entry for entry in layout.boxes if entry[0] not in whole))
            for layout in source[1:]
        ]
        return super().plan((source[0], *others), target)

    def _spread(self, source: Sequence[WeightLayout]) -> bool:
        return len({(layout.node, layout.device) for layout in source}) > 1


class CountsIn31Bits(GenericShardingManager):
    """Counts of bytes wrap at 2**31."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        plan = super().plan(source, target)
        return replace(plan, num_bytes=plan.num_bytes % 2**31, moved_bytes=plan.moved_bytes % 2**31)


class FourDimensions(GenericShardingManager):
    """Tensors have at most four dimensions."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        if deep := [meta.name for layout in source for meta in layout.tensors if len(meta.shape) > 4]:
            raise LayoutError(f"{deep[0]!r} has more than four dimensions")
        return super().plan(source, target)
