"""Micro-batches: complete, within their limit, and as many as asked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.microbatch import micro_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=40).map(lambda n: torch.tensor(n, dtype=torch.int64))


@given(lengths=LENGTHS, limit=st.integers(1, 120), min_count=st.integers(1, 50), by=st.sampled_from(["tokens", "rows"]))
def test_every_row_comes_once_in_at_least_the_passes_asked_for(
    lengths: torch.Tensor, limit: int, min_count: int, by: str
) -> None:
    passes = micro_batches(lengths, **{f"max_{by}": limit}, min_count=min_count)
    assert len(passes) >= min_count
    assert sorted(torch.cat(passes).tolist()) == list(range(len(lengths)))
    assert all(rows.dtype is torch.int64 for rows in passes)


@given(lengths=LENGTHS, limit=st.integers(1, 120), min_count=st.integers(1, 50))
def test_no_pass_is_over_its_limit_but_a_single_row_that_is(lengths: torch.Tensor, limit: int, min_count: int) -> None:
    for rows in micro_batches(lengths, max_tokens=limit, min_count=min_count):
        assert len(rows) <= 1 or int(lengths[rows].sum()) <= limit
    for rows in micro_batches(lengths, max_rows=limit, min_count=min_count):
        assert len(rows) <= limit


@given(lengths=LENGTHS, limit=st.integers(1, 40))
def test_passes_are_neighbours_in_length(lengths: torch.Tensor, limit: int) -> None:
    passes = [lengths[rows] for rows in micro_batches(lengths, max_tokens=limit)]
    if len(passes) > 1:
        assert all(a.max() <= b.min() for a, b in itertools.pairwise(passes))


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40).map(torch.tensor), min_count=st.integers(2, 60))
def test_a_forced_count_is_met_exactly_when_one_pass_would_do(lengths: torch.Tensor, min_count: int) -> None:
    passes = micro_batches(lengths, max_tokens=10_000, min_count=min_count)
    assert len(passes) == min_count
    assert sum(len(rows) > 0 for rows in passes) == min(min_count, len(lengths))


def test_one_pass_keeps_the_order_of_its_rows() -> None:
    assert micro_batches(torch.tensor([5, 2, 9]), max_tokens=16)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 5, "max_rows": 5}, {"max_tokens": 0}, {"max_rows": -1}])
def test_not_exactly_one_positive_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected one of them, at least 1"):
        micro_batches(torch.tensor([3]), **limits)


@given(
    lengths=LENGTHS,
    limit=st.integers(1, 120),
    min_count=st.integers(1, 9),
    by=st.sampled_from(["tokens", "rows"]),
    seed=st.integers(0, 9),
)
def test_groups_stay_whole_and_within_the_limit_unless_one_alone_is_over_it(
    lengths: torch.Tensor, limit: int, min_count: int, by: str, seed: int
) -> None:
    groups = torch.randint(-4, 4, (len(lengths),), generator=torch.Generator().manual_seed(seed)) * 10**15
    passes = micro_batches(lengths, **{f"max_{by}": limit}, min_count=min_count, groups=groups)
    assert len(passes) >= min_count
    assert sorted(torch.cat(passes).tolist()) == list(range(len(lengths)))
    owners = [set(groups[rows].tolist()) for rows in passes]
    assert sum(map(len, owners)) == len(set(groups.tolist()))
    for rows, owner in zip(passes, owners, strict=True):
        cost = int(lengths[rows].sum()) if by == "tokens" else len(rows)
        assert cost <= limit or len(owner) == 1


@given(
    lengths=LENGTHS,
    limit=st.integers(1, 120),
    min_count=st.integers(1, 9),
    by=st.sampled_from(["tokens", "rows"]),
    seed=st.integers(0, 9),
)
def test_rows_that_belong_together_are_neighbours_and_no_limit_gives_way(
    lengths: torch.Tensor, limit: int, min_count: int, by: str, seed: int
) -> None:
    near = torch.randint(-4, 4, (len(lengths),), generator=torch.Generator().manual_seed(seed)) * 10**15
    passes = micro_batches(lengths, **{f"max_{by}": limit}, min_count=min_count, near=near)
    assert len(passes) >= min_count
    assert sorted(torch.cat(passes).tolist()) == list(range(len(lengths)))
    for rows in passes:
        cost = int(lengths[rows].sum()) if by == "tokens" else len(rows)
        assert cost <= limit or len(rows) == 1
    if sum(len(rows) > 0 for rows in passes) > 1:
        runs = [key for key, _ in itertools.groupby(near[torch.cat(passes)].tolist())]
        assert len(runs) == len(set(runs))
