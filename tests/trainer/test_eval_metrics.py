"""pass@k, maj@k and standard errors: by hand, by plain enumeration, and against closed forms."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.config.sections.evaluation import MAX_VOTES, powers_of_two
from rlsdk.trainer.stages.evaluation.metrics import (
    Vote,
    clustered_error,
    majority_at_k,
    pass_at_k,
)

VOTES = st.lists(
    st.builds(Vote, correct=st.booleans(), answer=st.sampled_from([None, "1", "2", "3", "4"])), min_size=1, max_size=8
)


def votes(*cast: tuple[str | None, int, bool]) -> list[Vote]:
    """Answer, how many samples give it, whether they are correct."""
    return [Vote(correct=correct, answer=answer) for answer, count, correct in cast for _ in range(count)]


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs hold the correct one
        (4, 1, 4, 1.0),
        (5, 2, 2, 0.7),  # 1 - 3/10
        (10, 3, 5, 11 / 12),  # 1 - C(7, 5) / C(10, 5) = 1 - 21/252
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.integers(1, 2000), st.data())
@settings(max_examples=100, deadline=None)
def test_pass_at_k_is_exact_where_binomials_are_large(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(
    ("cast", "k", "expected"),
    [
        (votes(("a", 3, True), ("b", 2, False)), 5, 1.0),
        (votes(("a", 2, True), ("b", 3, False)), 5, 0.0),
        (votes(("a", 2, True), ("b", 2, False)), 4, 0.5),  # a tie is drawn
        (votes(("a", 1, True), ("b", 1, False), ("c", 1, False)), 3, 1 / 3),
        (votes(("a", 1, True), (None, 3, False)), 4, 1.0),  # who has no answer does not vote
        (votes((None, 4, True)), 4, 0.0),  # nobody votes: nothing is correct
        (votes(("a", 1, True), ("a", 1, False)), 2, 0.5),  # one answer, graded differently
        (votes(("a", 1, True), ("b", 1, False)), 1, 0.5),
        (votes(("a", 1, True), (None, 1, False)), 1, 0.5),
        # pairs of a a b: aa wins, ab twice is drawn
        (votes(("a", 2, True), ("b", 1, False)), 2, (1 + 0.5 + 0.5) / 3),
    ],
)
def test_majorities_by_hand(cast: Sequence[Vote], k: int, expected: float) -> None:
    assert majority_at_k(cast, k) == pytest.approx(expected, abs=1e-12)


def plain_majority(cast: Sequence[Vote], k: int) -> float:
    """Every subset of k samples, one after the other; an answer counts as the share of all its samples that are
    correct."""
    share = {
        answer: statistics.fmean(vote.correct for vote in cast if vote.answer == answer)
        for answer in {vote.answer for vote in cast}
    }
    won = []
    for subset in itertools.combinations(cast, k):
        counts = Counter(vote.answer for vote in subset if vote.answer is not None)
        first = [answer for answer, count in counts.items() if count == max(counts.values())]
        won.append(statistics.fmean(share[answer] for answer in first) if first else 0.0)
    return statistics.fmean(won)


@given(VOTES, st.data())
@settings(max_examples=200, deadline=None)
def test_majorities_are_the_mean_over_all_subsets(cast: list[Vote], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(cast)))
    assert majority_at_k(cast, k) == pytest.approx(plain_majority(cast, k), abs=1e-9)


def test_a_majority_of_one_sample_is_its_own_answer() -> None:
    cast = votes(("a", 40, True), ("b", 60, False), (None, 28, False))
    assert majority_at_k(cast, 1) == pytest.approx(40 / 128, abs=1e-9)
    assert majority_at_k(cast, 128) == 0.0


def test_majorities_of_many_samples_stay_finite() -> None:
    cast = votes(("a", MAX_VOTES // 2, True), ("b", MAX_VOTES // 2, False))
    assert majority_at_k(cast, MAX_VOTES // 2) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, []), (1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_ks(count: int, expected: list[int]) -> None:
    assert powers_of_two(count) == expected


@given(st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=2, max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_error_of_groups_of_one_size_is_that_of_their_means(groups: list[list[float]]) -> None:
    means = [statistics.fmean(group) for group in groups]
    assert clustered_error(groups) == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)), abs=1e-9)


def test_the_error_of_groups_of_several_sizes_by_hand() -> None:
    # mean 0.5; sums of deviations: 1 * .5 and 3 values (0, 0, 1) - .5 -> -.5; sqrt(.5 * 2 / 1) / 4
    assert clustered_error([[1.0], [0.0, 0.0, 1.0], []]) == pytest.approx(math.sqrt(0.5 * 2) / 4)
    assert clustered_error([[1.0, 0.0]]) is None
    assert clustered_error([]) is None
