"""Splits weighted items into parts of nearly equal weight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count


def balanced_partition(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Karmarkar-Karp (largest differencing, 1982): indices of each part, each sorted; every index once.

    Args:
        weights: of the items, at least 0.
        parts: at least 1; some are empty when there are fewer items.
        equal_size: part sizes differ by at most one item, at some cost in balance.
    """
    if parts < 1:
        raise ValueError(f"cannot cut {len(weights)} items into {parts} parts; expected at least 1")
    if parts == 1:
        return [list(range(len(weights)))]
    order = count()
    heap = [_entry(bundle, order) for bundle in _bundles(weights, parts, equal_size)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, wide = heapq.heappop(heap)
        _, _, narrow = heapq.heappop(heap)
        # The heaviest part of one is joined with the lightest of the other, so that their differences cancel.
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(wide, reversed(narrow), strict=True)]
        heapq.heappush(heap, _entry(joined, order))
    found = heap[0][2] if heap else [(0, [])] * parts
    return [sorted(items) for _, items in sorted(found, key=lambda part: min(part[1], default=len(weights)))]


Bundle = list[tuple[int, list[int]]]
"""`parts` pairs of weight and items."""


def _bundles(weights: Sequence[int], parts: int, equal_size: bool) -> list[Bundle]:
    """Bundles of one item and empty parts; or, for equal sizes, of `parts` items with neighbouring weights."""
    if not equal_size:
        return [[(int(w), [at]), *((0, list[int]()) for _ in range(parts - 1))] for at, w in enumerate(weights)]
    by_weight = sorted(range(len(weights)), key=lambda at: -weights[at])
    chunks = [by_weight[start : start + parts] for start in range(0, len(weights), parts)]
    return [
        [*((int(weights[at]), [at]) for at in chunk), *((0, list[int]()) for _ in range(parts - len(chunk)))]
        for chunk in chunks
    ]


def _entry(bundle: Bundle, order: count[int]) -> tuple[int, int, Bundle]:
    """Heap entry: largest difference first, ties by insertion order."""
    ranked = sorted(bundle, key=lambda part: -part[0])
    return ranked[-1][0] - ranked[0][0], next(order), ranked
