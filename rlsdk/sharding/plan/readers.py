"""Targets that receive the same pieces from a source: they read them from the same slots of one ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import WeightLayout
from rlsdk.sharding.plan.box_table import Ints, mix
from rlsdk.sharding.plan.packed_plan import Pieces


def shared_rings(
    pieces: Pieces, by_ring: NDArray[np.bool_], transport: Ints, target: Sequence[WeightLayout]
) -> Mapping[int, Mapping[int, tuple[int, ...]]]:
    """By target, then by source: all targets that share the source's ring, at least two.

    They receive the same pieces in the same order, from all sources together, so that their rounds are equal and none
    can wait for another that waits for it; and they are in processes of their own, which receive at the same time.

    Args:
        pieces: all pieces.
        by_ring: `[pieces]`: whether the piece comes by a transport whose slots can be shared.
        transport: `[pieces]`: number of the transport.
        target: all targets.
    """
    rows = np.flatnonzero(by_ring)
    if not len(rows):
        return {}
    rank, places = pieces.boxes.rank, _places(pieces)
    whole = np.zeros(len(target), np.uint64)
    np.add.at(whole, rank, places)
    num_sources = int(pieces.source.max()) + 1
    pairs, which = np.unique(rank[rows] * num_sources + pieces.source[rows], return_inverse=True)
    taken = np.zeros(len(pairs), np.uint64)
    np.add.at(taken, which.reshape(-1), places[rows] ^ mix(transport[rows], 3))
    processes = Counter(layout.process for layout in target)
    groups: dict[tuple[int, int, int], list[int]] = {}
    for pair, key in zip(pairs.tolist(), taken.tolist(), strict=True):
        taker, giver = divmod(pair, num_sources)
        if processes[target[taker].process] == 1:
            groups.setdefault((giver, key, int(whole[taker])), []).append(taker)
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for (giver, _, _), takers in groups.items():
        for taker in takers if len(takers) > 1 else ():
            found.setdefault(taker, {})[giver] = tuple(takers)
    return found


def _places(pieces: Pieces) -> NDArray[np.uint64]:
    """64 bits for each piece: of what it is, and of its place among the pieces of its target."""
    boxes = pieces.boxes
    first = np.searchsorted(boxes.rank, boxes.rank)
    bits = mix(boxes.name) + mix(np.arange(len(boxes)) - first, 1)
    for axis in range(boxes.offset.shape[1]):
        bits = mix((bits ^ mix(boxes.offset[:, axis], 2 * axis)).view(np.int64), 1)
        bits = mix((bits ^ mix(boxes.size[:, axis], 2 * axis + 1)).view(np.int64), 1)
    return bits
