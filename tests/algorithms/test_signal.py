"""One notion of different scores: large ones keep their differences, and rounding makes none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from algorithm_cases import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk.algorithms as alg
from rlsdk.interfaces import Batch

GROUPED: dict[str, Callable[[Batch], Batch]] = {
    "grpo": alg.grpo,
    "grpo_batch": lambda batch: alg.grpo(batch, scale="batch"),
    "dr_grpo": alg.dr_grpo,
    "grpo_passk": alg.grpo_passk,
    "rloo": alg.rloo,
    "opo": alg.opo,
    "gpg": alg.gpg,
}
BASES = (1e8, 16_777_217.0, -1e9, 1e12)
NOISE = ([0.1 + 0.2, 0.3, 0.3], [sum([0.1] * 10), 1.0, 1.0], [1e8 * (0.1 + 0.2), 1e8 * 0.3], [0.1 * 3 - 0.3, 0.0],
         [-0.7, -(0.1 + 0.6)])  # fmt: skip


def advantages(estimate: Callable[[Batch], Batch], batch: Batch) -> list[float]:
    """By row."""
    found = estimate(alg.token_level_rewards(batch))["advantages"]
    return found[batch.offsets[1:] - 1].double().tolist()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", [*GROUPED, "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_scores_keep_their_differences_whatever_their_size(name: str, base: float) -> None:
    """In float32, 1e8 and 1e8 + 1 are one number."""
    estimate = GROUPED.get(name) or getattr(alg, name)
    small, uid = [0.0, 1.0, 2.0, 5.0, 3.0, 3.0], [0, 0, 0, 0, 1, 1]
    expected = advantages(estimate, make_batch(small, uid))
    large = make_batch([base + score for score in small], uid)
    assert advantages(estimate, large) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert alg.group_signal(large).has_signal.tolist() == [True, False]


def test_steps_of_one_sample_a_prompt_keep_their_differences_too() -> None:
    scores = [1e8 + k for k in range(4)]
    found = advantages(alg.reinforce_plus_plus, make_batch(scores, [0, 1, 2, 3]))
    assert found == pytest.approx(advantages(alg.reinforce_plus_plus, make_batch([0.0, 1, 2, 3], [0, 1, 2, 3])))


def test_scores_of_tokens_and_of_a_baseline_keep_their_differences_too() -> None:
    batch = make_batch([0.0, 0.0], [0, 0], baseline_scores=torch.tensor([1e8, 1e8], dtype=torch.float64))
    tokens = torch.tensor([0.0, 1e8, 1.0, 0.0, 1e8, 3.0], dtype=torch.float64)
    batch = batch.with_tokens(token_scores=tokens)
    assert alg.group_signal(batch).share == 1.0
    assert advantages(alg.dr_grpo, batch) == [-1.0, 1.0]
    first = alg.remax(alg.token_level_rewards(batch))["advantages"]
    assert first[[1, 4]].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("scores", NOISE)
@pytest.mark.parametrize("name", GROUPED)
def test_scores_that_differ_by_rounding_are_equal(name: str, scores: list[float]) -> None:
    uid = [0] * len(scores)
    batch = make_batch(scores, uid)
    assert not alg.has_signal(torch.tensor(scores, dtype=torch.float64))
    assert alg.group_signal(batch).share == 0.0
    assert advantages(GROUPED[name], batch) == [0.0] * len(scores)
    # beside others that differ
    beside = make_batch([*scores, 7.0], [*uid, 0])
    found = advantages(GROUPED[name], beside)
    assert found[:-1] == pytest.approx([found[0]] * len(scores), rel=1e-6)


def test_a_penalty_for_length_makes_no_difference_out_of_rounding() -> None:
    """0.3 less 0.1 for a token more is 0.2."""
    batch = make_batch([0.3, 0.2], [0, 0], [(1, 2), (1, 1)])
    shaped = alg.length_penalty(batch, coef=0.1, free_tokens=1)
    assert alg.group_signal(shaped).share == 0.0
    assert advantages(alg.grpo, shaped) == [0.0, 0.0]
    right = alg.relative_length_reward(make_batch([sum([0.1] * 10), 1.0], [0, 0], [(1, 2), (1, 1)]))
    assert right["scores"].tolist() == pytest.approx([0.5, 1.5])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=6),
    st.sampled_from([0.1, 1.0, 1e-6, 1e7]),
    st.sampled_from([0.0, 0.3, 1e8]),
    st.sampled_from(list(GROUPED)),
)
def test_a_group_has_signal_where_it_has_advantages(levels: list[int], unit: float, base: float, name: str) -> None:
    scores = [base + level * unit for level in levels]
    estimate, compares = GROUPED[name], getattr(GROUPED[name], "compares", None)
    batch = make_batch(scores, [0] * len(scores))
    found = any(advantages(estimate, batch))
    assert found == alg.has_signal(torch.tensor(scores, dtype=torch.float64), compares=compares)
    assert found == bool(alg.group_signal(batch, compares=compares).share)


def test_a_tie_for_the_best_is_no_signal_for_pass_at_k() -> None:
    """The samples differ, but no sample has an advantage."""
    compares = alg.grpo_passk.compares  # type: ignore[attr-defined]
    for scores, expected in (([1.0, 1.0, 0.0], False), ([1.0, 0.0, 0.0], True), ([0.1 + 0.2, 0.3, 0.0], False)):
        tied = torch.tensor(scores, dtype=torch.float64)
        assert alg.has_signal(tied)
        assert alg.has_signal(tied, compares=compares) is expected
        assert bool(alg.group_signal(make_batch(scores, [0] * 3), compares=compares).share) is expected


@pytest.mark.parametrize(
    ("score", "threshold", "expected"),
    [
        (sum([0.1] * 10), 1.0, True), (0.7, 0.7, True), (0.1 + 0.7, 0.8, True), (0.999999, 1.0, False),
        (1e8 * 0.3, 1e8 * (0.1 + 0.2), True), (1e8 - 1, 1e8, False), (0.0, 0.0, True), (-0.1, 0.0, False),
    ],
)  # fmt: skip
def test_a_score_reaches_a_threshold_up_to_rounding(score: float, threshold: float, expected: bool) -> None:
    assert alg.reaches(score, threshold) is expected


def test_scores_of_ordinary_size_give_the_numbers_of_float32() -> None:
    """Recorded runs stay what they were."""
    batch = make_batch([0.1, 0.3, 1.0, 0.1 + 0.2], [0, 0, 0, 0])
    assert alg.score_dtype(batch) == torch.float32
    rewards = alg.token_level_rewards(batch)["token_level_rewards"]
    assert rewards.dtype == torch.float64
    assert rewards[batch.offsets[1:] - 1].tolist() == batch["scores"].float().double().tolist()
    for scores in ([1e8, 1e8 + 1], [1.0, 1.0 + 1e-8, 2.0]):
        assert alg.score_dtype(make_batch(scores, [0] * len(scores))) == torch.float64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True), ([0.0, 0.5, 0.9], True), ([0.0, 1.0, 1.0], True), ([-1.0, 2.0, 2.0], True),
        ([sum([0.1] * 10), 1.0], True), ([0.4, 1.0, 1.1], False), ([3.0, 2.0], False),
    ],
)  # fmt: skip
def test_values_that_go_on_above_the_threshold_are_no_verdict(values: list[float], expected: bool) -> None:
    assert alg.is_verdict(values, 1.0) is expected
