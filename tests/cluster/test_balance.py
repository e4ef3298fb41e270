"""Balanced partitions: complete, and as good as the theory says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.cluster.batches.balance import balanced_partition

WEIGHTS = st.lists(st.integers(0, 5000), max_size=60)


def heaviest(weights: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    return max(sum(weights[i] for i in part) for part in parts)


def longest_first(weights: Sequence[int], parts: int) -> int:
    """Heaviest part of the greedy rule (Graham's LPT)."""
    loads = [0] * parts
    for weight in sorted(weights, reverse=True):
        loads[loads.index(min(loads))] += weight
    return max(loads)


@given(weights=WEIGHTS, parts=st.integers(1, 9), equal_size=st.booleans())
def test_every_item_is_in_exactly_one_sorted_part(weights: list[int], parts: int, equal_size: bool) -> None:
    found = balanced_partition(weights, parts, equal_size=equal_size)
    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(weights)))
    assert all(part == sorted(part) for part in found)


@given(weights=WEIGHTS, parts=st.integers(1, 9))
def test_equal_size_parts_differ_by_one_item_at_most(weights: list[int], parts: int) -> None:
    sizes = [len(part) for part in balanced_partition(weights, parts, equal_size=True)]
    assert max(sizes) - min(sizes) <= 1


@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=7), parts=st.integers(2, 3))
def test_the_heaviest_part_is_within_the_proven_bound_of_the_best(weights: list[int], parts: int) -> None:
    """Michiels, Korst, Aarts (2003): 4/3 - 1/(3 parts)."""
    best = min(
        max(sum(w for w, at in zip(weights, places, strict=True) if at == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(weights))
    )
    found = heaviest(weights, balanced_partition(weights, parts))
    assert found <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9


def test_the_textbook_example_leaves_a_difference_of_two() -> None:
    """Karmarkar and Karp on 8, 7, 6, 5, 4: 16 against 14."""
    weights = [8, 7, 6, 5, 4]
    assert heaviest(weights, balanced_partition(weights, 2)) == 16


@pytest.mark.parametrize("parts", [2, 4, 8, 64])
def test_on_row_lengths_it_is_never_far_behind_and_mostly_ahead_of_longest_first(parts: int) -> None:
    source = random.Random(parts)
    ahead = 0
    for _ in range(20):
        weights = [source.randint(20, 4096) for _ in range(256)]
        mine, greedy = heaviest(weights, balanced_partition(weights, parts)), longest_first(weights, parts)
        assert mine <= greedy * 1.02
        ahead += mine <= greedy
    assert ahead >= 16


def test_equal_weights_are_dealt_out_evenly() -> None:
    assert sorted(map(len, balanced_partition([7] * 10, 4))) == [2, 2, 3, 3]


def test_the_same_weights_give_the_same_parts() -> None:
    weights = [5, 3, 3, 5, 1, 1, 9]
    assert balanced_partition(weights, 3) == balanced_partition(list(weights), 3)


def test_fewer_items_than_parts_leave_parts_empty_and_distinct() -> None:
    parts = balanced_partition([3], 3)
    assert sorted(parts) == [[], [], [0]]
    empty = balanced_partition([], 2)
    empty[0].append(1)
    assert empty[1] == []


def test_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="into 0 parts; expected at least 1"):
        balanced_partition([1, 2], 0)
