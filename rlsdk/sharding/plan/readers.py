"""Targets that receive the same pieces from a source: they read them from the same slots of one ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import WeightLayout
from rlsdk.sharding.plan.box_table import BoxTable, Hashes, Ints, mix
from rlsdk.sharding.plan.matching import Matching
from rlsdk.sharding.plan.routes import Routes


def shared_rings(
    matching: Matching,
    routes: Routes,
    shares_slots: NDArray[np.bool_],
    transport: Ints,
    target: Sequence[WeightLayout],
) -> Mapping[int, Mapping[int, tuple[int, ...]]]:
    """By target, then by source: all targets that share the source's ring, at least two.

    They receive the same pieces in the same order, from all sources together, so that their rounds are equal and none
    can wait for another that waits for it; and they are in processes of their own, which receive at the same time.

    Args:
        matching: all pieces.
        routes: targets with their sources.
        shares_slots: `[transports]`: whether targets can share a transport's slots.
        transport: `[routes]`: number of the transport.
        target: all targets.
    """
    processes = Counter(layout.process for layout in target)
    alone = np.array([processes[layout.process] == 1 for layout in target], bool)
    rows = np.flatnonzero(shares_slots[transport] & alone[routes.target])
    if not len(rows):
        return {}
    whole, taken = _received(matching, routes, np.unique(routes.target[rows]))
    takers, givers = routes.target[rows], routes.source[rows]
    keys = (givers, transport[rows], taken[rows], whole[takers])
    groups: dict[tuple[int, ...], list[int]] = {}
    for taker, *key in zip(takers.tolist(), *(column.tolist() for column in keys), strict=True):
        groups.setdefault(tuple(key), []).append(taker)
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for (giver, *_), takers_of in groups.items():
        for taker in takers_of if len(takers_of) > 1 else ():
            found.setdefault(taker, {})[giver] = tuple(takers_of)
    return found


def _received(matching: Matching, routes: Routes, targets: Ints) -> tuple[Hashes, Hashes]:
    """(`[targets]`: hash of all pieces of each of these targets, `[routes]`: hash of those that come this way)."""
    whole, taken = np.zeros(len(matching.wants), np.uint64), np.zeros(len(routes.target), np.uint64)
    places = _places(matching.parts)
    by_list: dict[int, Hashes] = {}
    for at in targets.tolist():
        first, last = np.searchsorted(routes.target, (at, at + 1))
        if matching.is_cut[at]:
            pieces = matching.pieces(at)
            source, hashes = pieces.source, _places(pieces.boxes)
        else:
            # Whole parts: the same for all targets of a list, and added up once for each set of holders.
            source = matching.pair_source[matching.pair_start[at] : matching.pair_start[at + 1]]
            wanted, rows = int(matching.wants[at]), matching.rows(at)
            if wanted not in by_list:
                by_list[wanted] = np.zeros(len(source), np.uint64)
                np.add.at(by_list[wanted], matching.pair_in_list[rows], places[rows])
            hashes = by_list[wanted]
        whole[at] = hashes.sum()
        np.add.at(taken, first + np.searchsorted(routes.source[first:last], source), hashes)
    return whole, taken


def _places(boxes: BoxTable) -> Hashes:
    """64 bits for each piece: of what it is, and of its place among the pieces of its `rank`."""
    first = np.searchsorted(boxes.rank, boxes.rank)
    bits = mix(boxes.name) + mix(np.arange(len(boxes)) - first, 1)
    for axis in range(boxes.offset.shape[1]):
        bits = mix((bits ^ mix(boxes.offset[:, axis], 2 * axis)).view(np.int64), 1)
        bits = mix((bits ^ mix(boxes.size[:, axis], 2 * axis + 1)).view(np.int64), 1)
    return bits
