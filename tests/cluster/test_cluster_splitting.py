"""Cutting rows over ranks and making one result again: pure functions."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlsdk.cluster import BatchRef, Join, MethodSpec, Split
from rlsdk.cluster.batches.splitting import as_run, longest_first, split_groups, split_near, split_rows
from rlsdk.cluster.batches.stored_fields import StoredFields
from rlsdk.cluster.calls.joining import joiner
from rlsdk.interfaces import Batch, BatchError

CutRows = Callable[[list[int], int], list[list[int]]]
LENGTHS = st.lists(st.integers(1, 4000), max_size=60)


both = pytest.mark.parametrize("cut_rows", [split_rows, longest_first])


@both
@given(lengths=LENGTHS, parts=st.integers(1, 9))
def test_every_row_goes_to_exactly_one_rank(cut_rows: CutRows, lengths: list[int], parts: int) -> None:
    cut = cut_rows(lengths, parts)
    assert len(cut) == parts
    assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in cut)


@both
@given(lengths=LENGTHS, parts=st.integers(1, 9))
def test_no_rank_has_more_than_its_share_and_one_row(cut_rows: CutRows, lengths: list[int], parts: int) -> None:
    loads = [sum(lengths[row] for row in rows) for rows in cut_rows(lengths, parts)]
    assert max(loads) <= sum(lengths) / parts + max(lengths, default=0)


@given(rows=st.lists(st.tuples(st.integers(1, 4000), st.integers(-3, 9)), max_size=60), parts=st.integers(1, 9))
def test_rows_of_one_group_go_to_one_rank(rows: list[tuple[int, int]], parts: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    cut = split_groups(lengths, groups, parts)
    assert len(cut) == parts
    assert sorted(row for part in cut for row in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in cut)
    owners = [{groups[row] for row in part} for part in cut]
    assert sum(map(len, owners)) == len(set(groups))


def test_pairs_are_balanced_as_well_as_rows() -> None:
    lengths = torch.randint(100, 4000, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    loads = [sum(lengths[row] for row in part) for part in split_groups(lengths, [at // 2 for at in range(1024)], 8)]
    assert max(loads) < 1.01 * sum(lengths) / 8


def test_whole_groups_need_a_batch_that_says_which() -> None:
    ref = BatchRef.of(Batch.from_rows([[1] * 3, [1], [1] * 2], uid=torch.tensor([7, 8, 7])), StoredFields(id))
    assert ref.cut(2, whole_groups=True) == [[0, 2], [1]]
    assert ref.select([2, 1]).cut(2, whole_groups=True) == [[0], [1]]
    with pytest.raises(BatchError, match="uid: required here but missing"):
        BatchRef.of(Batch.from_rows([[1], [2]]), StoredFields(id)).cut(2, whole_groups=True)


def test_many_rows_are_cut_within_a_hundredth_of_even() -> None:
    lengths = torch.randint(100, 4000, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    loads = [sum(lengths[row] for row in rows) for rows in split_rows(lengths, 64)]
    assert max(loads) < 1.01 * sum(lengths) / 64


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 5))
def test_split_and_joined_rows_are_the_batch_itself(lengths: list[int], parts: int) -> None:
    ids = torch.randperm(len(lengths)) * 7
    batch = Batch.from_rows([[row] * n for row, n in enumerate(lengths)], row_id=ids)
    cut = BatchRef.of(batch, StoredFields(id)).cut(parts)
    shares = [range(len(lengths))] if cut is None else cut
    answers = {rank: batch.select(list(rows)) for rank, rows in enumerate(shares)}
    joined = joiner(MethodSpec(split=Split.DATA, join=Join.ROWS), range(parts), ids)(answers)
    assert torch.equal(joined["input_ids"], batch["input_ids"])
    assert torch.equal(joined["row_id"], ids)


def test_a_result_that_is_no_batch_cannot_be_joined_by_rows() -> None:
    join = joiner(MethodSpec(split=Split.DATA, join=Join.ROWS), [0], torch.tensor([0]))
    with pytest.raises(BatchError, match="returns a Batch, got int"):
        join({0: 3})


@given(st.integers(0, 50), st.integers(1, 20))
def test_neighbouring_rows_are_recognised(start: int, count: int) -> None:
    assert as_run(np.arange(start, start + count)) == (start, start + count)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_other_rows_are_not_taken_for_neighbours(rows: list[int]) -> None:
    assume(rows != list(range(rows[0], rows[0] + len(rows))))
    assert as_run(np.array(rows)) is None


def test_what_a_worker_is_sent_does_not_grow_with_the_batch() -> None:
    batch = Batch(lengths=torch.full((100_000,), 1), tokens={}, rows={"row_id": torch.arange(100_000)})
    ref = BatchRef.of(batch, StoredFields(lambda _: "reference"))
    assert len(pickle.dumps(ref.stored())) < 300
    assert len(pickle.dumps(ref.select(torch.arange(500, 70_000)).stored())) < 300
    assert len(pickle.dumps(ref.select([5, 3, 9]).stored())) < 500


def test_groups_stay_together_where_that_is_nearly_as_even_and_part_where_it_is_not() -> None:
    groups = [at // 4 for at in range(64)]
    together = split_near([7] * 64, groups, 4)
    assert all(len({groups[row] for row in part}) == 4 for part in together)
    # Two groups for three parts: whole ones would leave a part without work.
    assert [len(part) for part in split_near([7] * 6, [0, 0, 0, 1, 1, 1], 3)] == [2, 2, 2]
