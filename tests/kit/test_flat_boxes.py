"""Boxes of a range of flat elements: exactly the range, in its order."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import Box
from rlsdk.kit.weights.flat_boxes import boxes_of_range


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_boxes_hold_the_elements_of_the_range_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [numbers[box.slices(Box.whole(shape))].flatten() for box in boxes]
    assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.int64)]), torch.arange(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_whole_rows_between_two_parts_are_one_box() -> None:
    assert boxes_of_range((4, 3), 2, 10) == [Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 1))]
