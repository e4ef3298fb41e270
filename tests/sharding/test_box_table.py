"""Boxes as columns, against counting elements in arrays."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import metas_of
from test_boxes import SHAPE, boxes, mark

from rlsdk.interfaces import Box, LayoutError
from rlsdk.sharding.plan.box_table import BoxTable, cut_rows, distinct, overlaps, pack
from rlsdk.testing.sharding.tensor_engines import tensor_layout

METAS = {meta.name: meta for meta in metas_of({"a": SHAPE, "b": SHAPE, "c": (3,)})}


@st.composite
def filled(draw: st.DrawFn) -> Box:
    """A box of at least one element."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in SHAPE)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(SHAPE, offset, strict=True)))


named = st.lists(st.tuples(st.sampled_from(["a", "b"]), filled()), max_size=8)


def table(entries: list[tuple[str, Box]]) -> BoxTable:
    layouts = [tensor_layout(list(METAS.values()), [entry], rank=rank) for rank, entry in enumerate(entries)]
    return pack(layouts, METAS, 3)


def unpacked(some: BoxTable) -> list[Box]:
    return [Box(tuple(o), tuple(s)) for o, s in zip(some.offset.tolist(), some.size.tolist(), strict=True)]


@given(named, named)
def test_overlaps_finds_what_every_pair_of_one_name_shares(
    wanted: list[tuple[str, Box]], held: list[tuple[str, Box]]
) -> None:
    found = {
        (left, right): box
        for rows, columns, shared in overlaps(table(wanted), table(held))
        for left, right, box in zip(rows.tolist(), columns.tolist(), unpacked(shared), strict=True)
    }
    expected = {
        (i, j): a[1].intersect(b[1])
        for i, a in enumerate(wanted)
        for j, b in enumerate(held)
        if a[0] == b[0] and a[1].intersect(b[1])
    }
    assert found == expected


@given(named)
def test_distinct_counts_each_name_and_box_once(entries: list[tuple[str, Box]]) -> None:
    first, which = distinct(table(entries))
    assert len(first) == len(set(entries))
    assert [entries[first[at]] for at in which] == entries


@given(filled(), st.integers(1, 130))
def test_cut_rows_tiles_the_box_with_pieces_within_the_bound_in_storage_order(box: Box, most: int) -> None:
    whole = table([("a", box)])
    pieces, origin = cut_rows(whole, np.array([most]))
    assert np.array_equal(mark(*unpacked(pieces)), mark(box))
    assert all(0 < piece.numel <= most for piece in unpacked(pieces))
    assert unpacked(pieces) == sorted(unpacked(pieces))
    assert not origin.any()


@settings(max_examples=300)
@given(filled(), st.lists(boxes(), max_size=5), st.booleans())
def test_the_measures_of_boxes_add_up_to_that_of_a_box_if_and_only_if_they_tile_it(
    box: Box, parts: list[Box], tile: bool
) -> None:
    inner = [part for part in (box.intersect(other) for other in parts) if part is not None and part.numel]
    if tile:
        split = max(range(3), key=lambda d: box.size[d])
        ends = [0, box.size[split] // 2, box.size[split]]
        inner = [
            Box(
                (*box.offset[:split], box.offset[split] + low, *box.offset[split + 1 :]),
                (*box.size[:split], high - low, *box.size[split + 1 :]),
            )
            for low, high in pairwise(ends)
            if high > low
        ]
    measured = table([("a", part) for part in inner]).measure().sum(dtype=np.uint64)
    assert (measured == table([("a", box)]).measure()[0]) == np.array_equal(mark(*inner), mark(box))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("d", Box.whole((3,))), "rank 0 lists a box of 'd', which is not among the tensors of its layout"),
        (("c", Box((1,), (3,))), r"box of 'c' at offset \[1\] of size \[3\]: beyond the tensor's shape \[3\]"),
        (("c", Box((0, 0), (3, 1))), r"offset \[0, 0\] of size \[3, 1\]: beyond the tensor's shape \[3\]"),
    ],
)
def test_boxes_that_do_not_lie_in_their_tensor_are_refused(entry: tuple[str, Box], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        table([entry])
