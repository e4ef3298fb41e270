"""Taking rows out of a packed batch, by every way that it is done."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import Batch

LENGTHS = st.lists(st.sampled_from([0, 1, 3, 40, 700, 1200]), min_size=1, max_size=9)


def batch_of(lengths: list[int]) -> Batch:
    start = torch.tensor([0, *lengths]).cumsum(0)
    ids = [list(range(int(at), int(at) + n)) for at, n in zip(start, lengths, strict=False)]
    batch = Batch.from_rows(ids, row_id=torch.arange(len(lengths)) * 3)
    return batch.with_tokens(wide=torch.stack([batch["input_ids"], -batch["input_ids"]], dim=1))


@given(LENGTHS, st.data())
def test_selected_rows_are_those_rows_whatever_their_length(lengths: list[int], data: st.DataObject) -> None:
    batch = batch_of(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12))
    chosen = batch.select(rows)
    expected = [batch["input_ids"][batch.offsets[row] : batch.offsets[row + 1]] for row in rows]
    assert torch.equal(chosen["input_ids"], torch.cat([*expected, torch.empty(0, dtype=torch.int64)]))
    assert torch.equal(chosen["wide"][:, 1], -chosen["input_ids"])
    assert chosen["row_id"].tolist() == [3 * row for row in rows]
    assert chosen.lengths.tolist() == [lengths[row] for row in rows]


@given(LENGTHS, st.integers(0, 9), st.integers(0, 9))
def test_a_slice_of_rows_shares_memory_and_equals_the_rows_by_number(lengths: list[int], low: int, high: int) -> None:
    batch = batch_of(lengths)
    run = batch.select(slice(low, high))
    by_number = batch.select(range(*slice(low, high).indices(len(lengths))))
    assert torch.equal(run["input_ids"], by_number["input_ids"])
    assert torch.equal(run["row_id"], by_number["row_id"])
    if run.num_tokens:
        start = batch["input_ids"].untyped_storage().data_ptr()
        assert run["input_ids"].untyped_storage().data_ptr() == start
