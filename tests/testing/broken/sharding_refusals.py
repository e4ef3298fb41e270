"""Sharding managers that plan what they should refuse, or refuse what they should plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from broken.sharding_base import Layouts
from rlsdk.interfaces import Box, LayoutError, ReshardPlan
from rlsdk.sharding import GenericShardingManager


class UnservedIsFine(GenericShardingManager):
    """Tensors that no target wants are silently omitted."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        wanted = {meta.name for layout in target for meta in layout.tensors}
        wanted |= {layout.tied.get(name, name) for layout in source for name in wanted}
        kept = [
            replace(
                layout,
                tensors=tuple(meta for meta in layout.tensors if meta.name in wanted),
                boxes=tuple(entry for entry in layout.boxes if entry[0] in wanted),
            )
            for layout in source
        ]
        return super().plan(tuple(kept), target)


class HolesAreFine(GenericShardingManager):
    """A box that no rank holds is omitted from the plan."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        try:
            return super().plan(source, target)
        except LayoutError:
            wanted = [replace(w, boxes=tuple(e for e in w.boxes if self._held(e, source))) for w in target]
            return super().plan(source, tuple(wanted))

    def _held(self, entry: tuple[str, Box], source: Layouts) -> bool:
        name, box = entry
        held = [b for layout in source for n, b in layout.boxes if n == name and len(b.size) == len(box.size)]
        return sum(common.numel for b in held if (common := box.intersect(b)) is not None) >= box.numel


class SameSizeIsSameShape(GenericShardingManager):
    """Shapes are compared by their number of elements."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        held = {meta.name: meta for layout in source for meta in layout.tensors}
        seen = []
        for layout in target:
            known = [(m, held[m.name].shape) for m in layout.tensors if m.name in held]
            turned = {m.name for m, shape in known if m.shape != shape and sorted(m.shape) == sorted(shape)}
            tensors = tuple(replace(m, shape=held[m.name].shape) if m.name in turned else m for m in layout.tensors)
            boxes = tuple((n, Box(b.offset[::-1], b.size[::-1]) if n in turned else b) for n, b in layout.boxes)
            seen.append(replace(layout, tensors=tensors, boxes=boxes))
        return super().plan(source, tuple(seen) if seen != list(target) else target)


class KnowsNoTies(GenericShardingManager):
    """A tensor that the sources hold under its other tied name is unknown."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        return super().plan(tuple(replace(layout, tied={}) for layout in source), target)


class AnyTransport(GenericShardingManager):
    """The allowed transports are ignored."""

    def __init__(self, train: Any, rollout: Any, *, transports: Any = None, **others: Any) -> None:
        super().__init__(train, rollout, **others)


class TiedNamesOfAny(GenericShardingManager):
    """A tied name counts for all ranks if any of them lists it."""

    def plan(self, source: Layouts, target: Layouts) -> ReshardPlan:
        tied = {name: shared for layout in source for name, shared in layout.tied.items()}
        return super().plan(tuple(replace(layout, tied=tied) for layout in source), target)
