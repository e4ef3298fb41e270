"""Counts and positions that a batch keeps are those that it would compute, and never those of other rows."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import Batch
from rlsdk.interfaces.batch import concat

ROWS = st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=6)
NAMES = ("offsets", "row_of_token", "position_ids", "sample_of_row")


def batch_of(rows: list[list[int]]) -> Batch:
    number = torch.arange(len(rows))
    return Batch.from_rows(rows, uid=number // 3, sample=number // 2 % 2)


def assert_places(kept: Batch) -> None:
    """Equal to those of a batch that keeps none."""
    plain = Batch(lengths=kept.lengths, tokens=kept.tokens, rows=kept.rows)
    assert (kept.num_tokens, kept.max_length) == (plain.num_tokens, plain.max_length)
    for name in NAMES:
        assert torch.equal(getattr(kept, name), getattr(plain, name)), name


@given(ROWS)
def test_kept_places_are_the_computed_ones(rows: list[list[int]]) -> None:
    kept = batch_of(rows).with_places()
    assert_places(kept)
    assert kept.position_ids is kept.position_ids
    fields = kept.with_tokens(x=torch.zeros(kept.num_tokens)).with_meta(temperature=2.0).keep(["input_ids"])
    assert fields.position_ids is kept.position_ids
    assert_places(fields)


@given(ROWS, st.data())
def test_other_rows_have_their_own_places(rows: list[list[int]], data: st.DataObject) -> None:
    kept = batch_of(rows).with_places()
    count = kept.num_rows
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True)) if count else []
    assert_places(kept.select(chosen))
    assert_places(kept.select(slice(1, None)))
    assert_places(concat([kept, kept.with_rows(row_id=kept["row_id"] + count)]))
    assert_places(kept.with_rows(uid=torch.zeros(count, dtype=torch.int64)))


@given(ROWS)
def test_copies_of_all_tensors_make_the_same_batch(rows: list[list[int]]) -> None:
    kept = batch_of(rows).with_places()
    copy = kept.with_tensors({name: tensor.clone() for name, tensor in kept.tensors().items()})
    assert copy.position_ids is not kept.position_ids
    assert_places(copy)
    assert torch.equal(copy["input_ids"], kept["input_ids"])
    assert pickle.loads(pickle.dumps(kept)).num_tokens == kept.num_tokens
