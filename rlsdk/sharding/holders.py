"""Who holds what: the source layouts, indexed by tensor and box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsdk.interfaces import Box, LayoutError, TensorMeta, WeightLayout, nearest
from rlsdk.sharding.boxes import subtract


@dataclass(frozen=True)
class Piece:
    """A box of a source tensor, and the source that is to give it."""

    source: int
    box: Box


class Holders:
    """Every box that any source holds. Empty boxes are left out."""

    def __init__(self, source: Sequence[WeightLayout]) -> None:
        self.tensors: dict[str, TensorMeta] = {}
        self.tied: dict[str, str] = {}
        self._boxes: dict[str, dict[Box, list[int]]] = {}
        for index, layout in enumerate(source):
            self.tied.update(layout.tied)
            self._add_tensors(layout)
            for name, box in layout.boxes:
                if box.numel:
                    self._boxes.setdefault(name, {}).setdefault(box, []).append(index)

    def _add_tensors(self, layout: WeightLayout) -> None:
        for meta in layout.tensors:
            known = self.tensors.setdefault(meta.name, meta)
            if known != meta:
                raise LayoutError(
                    f"source ranks disagree on {meta.name!r}: {list(known.shape)} {known.dtype} on one, "
                    f"{list(meta.shape)} {meta.dtype} on rank {layout.rank}"
                )

    def resolve(self, name: str) -> str:
        """The name under which the sources hold what a target calls `name`.

        Raises:
            LayoutError: no source holds it.
        """
        held = name if name in self.tensors else self.tied.get(name, name)
        if held not in self.tensors:
            raise LayoutError(
                f"the target asks for {name!r}, which no source rank holds{nearest(name, self.tensors)}; "
                f"the sources hold {len(self.tensors)} tensors"
            )
        return held

    def assign(self, name: str, box: Box, cost: Sequence[int], load: Sequence[int]) -> list[Piece]:
        """Cuts a wanted box into pieces, each with the source that gives it: the cheapest, then the least loaded.

        Args:
            name: as the sources call it.
            box: wanted part of that tensor.
            cost: of each source, for this target; lower is nearer.
            load: bytes that each source sends already.

        Raises:
            LayoutError: a part of the box is held by nobody.
        """
        offers = []
        for held, sources in self._boxes.get(name, {}).items():
            if box.intersect(held) is not None:
                best = min(sources, key=lambda s: (cost[s], load[s], s))
                offers.append((cost[best], load[best], held, best))
        pieces, rest = [], [box] if box.numel else []
        for _, _, held, source in sorted(offers):
            taken = [part for part in (open_box.intersect(held) for open_box in rest) if part is not None]
            pieces += [Piece(source, part) for part in taken]
            if taken:
                rest = [left for open_box in rest for left in subtract(open_box, held)]
            if not rest:
                break
        if rest:
            raise LayoutError(
                f"{name!r}: the part at offset {list(rest[0].offset)} of size {list(rest[0].size)} is wanted, but no "
                f"source rank holds it ({len(offers)} source boxes touch what is wanted)"
            )
        return sorted(pieces, key=lambda piece: piece.box)


def distances(source: Sequence[WeightLayout], target: WeightLayout) -> list[int]:
    """How far each source is from a target: 0 one process, 1 one device, 2 one node, 3 another node."""
    return [_distance(layout, target) for layout in source]


def _distance(source: WeightLayout, target: WeightLayout) -> int:
    if source.process == target.process:
        return 0
    if source.node != target.node:
        return 3
    return 1 if source.device == target.device else 2


def tied_to(target: Sequence[WeightLayout]) -> Mapping[str, str]:
    """Every tied name of the targets -> the name they hold it under."""
    return {alias: name for layout in target for alias, name in layout.tied.items()}
