"""Box arithmetic, against counting elements in an array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import Box
from rlsdk.sharding.plan.boxes import covered_elements, subtract

SHAPE = (6, 5, 4)


@st.composite
def boxes(draw: st.DrawFn, dims: int = 3) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in SHAPE[:dims])
    return Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(SHAPE, offset, strict=False)))


def mark(*parts: Box) -> np.ndarray:
    """How often each element of the tensor lies in a part."""
    count = np.zeros(SHAPE, dtype=int)
    for part in parts:
        count[part.slices(Box.whole(SHAPE))] += 1
    return count


@given(boxes(), boxes())
def test_what_subtract_leaves_is_the_box_without_the_hole_each_element_once(box: Box, hole: Box) -> None:
    assert np.array_equal(mark(*subtract(box, hole)), (mark(box) > 0) & ~(mark(hole) > 0))
    assert all(part.numel for part in subtract(box, hole))


@given(boxes(), st.lists(boxes(), max_size=4))
def test_covered_elements_counts_the_union(box: Box, covers: list[Box]) -> None:
    union = (mark(*covers) > 0) & (mark(box) > 0)
    assert covered_elements(box, covers) == union.sum()


def test_scalars_are_boxes_of_one_element() -> None:
    scalar = Box((), ())
    assert subtract(scalar, scalar) == []
    assert covered_elements(scalar, [scalar]) == 1
    assert covered_elements(scalar, []) == 0
