"""Arithmetic of boxes that the planner needs beyond `Box.intersect`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rlsdk.interfaces import Box


def subtract(box: Box, hole: Box) -> list[Box]:
    """The rest of `box` without `hole`: disjoint boxes, at most two per dimension."""
    inner = box.intersect(hole)
    if inner is None:
        return [box] if box.numel else []
    rest = []
    offset, size = list(box.offset), list(box.size)
    for d in range(len(offset)):
        before, after = inner.offset[d] - offset[d], offset[d] + size[d] - inner.offset[d] - inner.size[d]
        if before:
            rest.append(_with(offset, size, d, offset[d], before))
        if after:
            rest.append(_with(offset, size, d, inner.offset[d] + inner.size[d], after))
        offset[d], size[d] = inner.offset[d], inner.size[d]
    return rest


def _with(offset: list[int], size: list[int], d: int, start: int, length: int) -> Box:
    return Box((*offset[:d], start, *offset[d + 1 :]), (*size[:d], length, *size[d + 1 :]))


def covered_elements(box: Box, covers: Sequence[Box]) -> int:
    """Number of elements of `box` in any of `covers`, counted on the grid of all their edges."""
    inner = [part for part in (box.intersect(cover) for cover in covers) if part is not None]
    if not inner or not box.size:
        return box.numel if inner else 0
    edges = [
        sorted({edge for part in inner for edge in (part.offset[d], part.offset[d] + part.size[d])})
        for d in range(len(box.size))
    ]
    inside = np.zeros([len(e) - 1 for e in edges], dtype=bool)
    for part in inner:
        inside[
            tuple(slice(e.index(o), e.index(o + n)) for e, o, n in zip(edges, part.offset, part.size, strict=True))
        ] = True
    volume = np.ones((), dtype=np.int64)
    for axis_edges in edges:
        volume = np.multiply.outer(volume, np.array([b - a for a, b in pairwise(axis_edges)], dtype=np.int64))
    return int(volume[inside].sum())
