"""Boxes of a range of a tensor's flat elements: for engines that split flattened tensors over ranks."""

from __future__ import annotations

import math

from rlsdk.interfaces import Box


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that hold elements `start` to `stop` (row-major), in their order; each is a contiguous part of the
    range. At most two per dimension, and one more: part of a row, whole rows, part of a row."""
    if start >= stop:
        return []
    if not shape or (start, stop) == (0, math.prod(shape)):
        return [Box.whole(shape)]
    inner = math.prod(shape[1:])
    row, end = -(-start // inner), stop // inner
    if row > end:  # within one row
        return _in_row(shape, end, start - end * inner, stop - end * inner)
    boxes = _in_row(shape, row - 1, start - (row - 1) * inner, inner) if start % inner else []
    if end > row:
        boxes.append(Box((row, *(0 for _ in shape[1:])), (end - row, *shape[1:])))
    return [*boxes, *(_in_row(shape, end, 0, stop - end * inner) if stop % inner else [])]


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes_of_range(shape[1:], start, stop)]
