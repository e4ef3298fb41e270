"""Rewards per token, and the log-prob metrics."""

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch, poison, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import Samples, log_prob_difference, token_level_rewards
from rlsdk.algorithms.kl import KL_ESTIMATORS
from rlsdk.algorithms.reductions import outcome_rewards
from rlsdk.interfaces import Batch, BatchError


def test_the_score_stands_on_the_last_response_token() -> None:
    batch = make_batch([2.0, -1.0], [0, 1], [(1, 2), (2, 1)])
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0, 2.0, 0, 0, -1.0]


def test_tool_tokens_after_the_last_response_token_get_nothing() -> None:
    batch = make_batch([2.0], [0], [(1, 3)])
    batch = batch.with_tokens(response_mask=torch.tensor([False, True, True, False]))
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0, 2.0, 0]


def test_the_penalty_by_hand() -> None:
    batch = make_batch([1.0], [0], [(1, 2)]).with_tokens(
        old_log_probs=torch.tensor([0.0, -1.0, -2.0]), ref_log_probs=torch.tensor([5.0, -1.5, -1.0])
    )
    rewards = token_level_rewards(batch, kl_coef=0.1, log_probs=batch["old_log_probs"])["token_level_rewards"]
    assert rewards.tolist() == pytest.approx([0.0, -0.05, 1.1])


@settings(max_examples=50, deadline=None)
@given(steps(), st.floats(0, 1), st.sampled_from(sorted(KL_ESTIMATORS)))
def test_a_rows_rewards_add_up_to_its_score_less_its_penalty(batch: Batch, kl_coef: float, estimator: str) -> None:
    made = token_level_rewards(batch, kl_coef, estimator, log_probs=batch["old_log_probs"])
    kl = KL_ESTIMATORS[estimator](batch["old_log_probs"], batch["ref_log_probs"]).double()
    penalty = batch.row_sum(torch.where(batch["response_mask"], kl, 0.0))
    answered = batch.row_sum(batch["response_mask"].long()) > 0
    expected = torch.where(batch["valid"] & answered, batch["scores"].double() - kl_coef * penalty, 0.0)
    torch.testing.assert_close(outcome_rewards(Samples.of(made)), expected, rtol=1e-4, atol=1e-4)
    assert not made["token_level_rewards"][~batch["response_mask"]].any()
    made.validate(["token_level_rewards"])


def test_rows_that_are_not_valid_get_zero_even_where_their_score_is_nan() -> None:
    batch = make_batch([float("nan"), 1.0], [0, 0], valid=[False, True])
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0, 0, 0, 0, 1.0]


def test_a_row_without_a_response_gets_nothing() -> None:
    batch = make_batch([3.0, 1.0], [0, 0], [(2, 0), (1, 1)])
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0, 0, 1.0]


def test_scores_of_tokens_are_added() -> None:
    batch = make_batch([2.0], [0], [(1, 2)]).with_tokens(token_scores=torch.tensor([9.0, 0.5, 0.25]))
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0.5, 2.25]


def penalised(**fields: torch.Tensor) -> Batch:
    return make_batch([1.0, 1.0], [0, 0], valid=[True, False]).with_tokens(ref_log_probs=torch.zeros(6), **fields)


def test_the_penalty_never_guesses_whose_log_probs_it_takes() -> None:
    batch = penalised(old_log_probs=torch.ones(6), rollout_log_probs=torch.ones(6))
    with pytest.raises(BatchError, match="needs the policy's log-probs: pass log_probs="):
        token_level_rewards(batch, 0.5)


@pytest.mark.parametrize("hole", [torch.nan, -torch.inf])
def test_log_probs_with_holes_are_refused_by_row(hole: float) -> None:
    """Zeros in their place were read as log-probs, and rewards [1, 0, 1, 0] became [1, 0, .758, 0] at a KL of 0."""
    log_probs = torch.tensor([0.0, -1.0, hole, 0.0, -1.0, -1.0])
    with pytest.raises(BatchError, match=r"log_probs: 1 response tokens of 1 rows \(row_id \[0\]\) have no finite"):
        token_level_rewards(penalised(), 0.5, log_probs=log_probs)
    with pytest.raises(BatchError, match="ref_log_probs: 1 response tokens"):
        token_level_rewards(penalised().with_tokens(ref_log_probs=log_probs), 0.5, log_probs=torch.zeros(6))


def test_holes_where_nothing_counts_are_fine() -> None:
    """The prompt, and a row whose reward failed."""
    log_probs = torch.tensor([torch.nan, -1.0, -1.0, torch.nan, torch.nan, torch.nan])
    rewards = token_level_rewards(penalised(), 0.5, log_probs=log_probs)["token_level_rewards"]
    assert rewards.tolist() == [0, 0.5, 1.5, 0, 0, 0]


def test_log_probs_of_another_shape_are_refused() -> None:
    with pytest.raises(BatchError, match=r"log_probs: expected \[6\] \(N tokens\), got \[2, 3\]"):
        token_level_rewards(penalised(), 0.5, log_probs=torch.zeros(2, 3))


def test_a_penalty_without_a_reference_is_refused_by_name() -> None:
    batch = make_batch([0.0], [0]).with_tokens(rollout_log_probs=torch.ones(3))
    with pytest.raises(BatchError, match="no field 'ref_log_probs'"):
        token_level_rewards(batch, 0.5, log_probs=batch["rollout_log_probs"])


@settings(max_examples=50, deadline=None)
@given(steps())
def test_what_stands_off_the_mask_changes_nothing(batch: Batch) -> None:
    clean = token_level_rewards(batch, 0.5, log_probs=batch["old_log_probs"])
    noisy = poison(batch, "old_log_probs", "ref_log_probs")
    noisy = token_level_rewards(noisy, 0.5, log_probs=noisy["old_log_probs"])
    assert torch.equal(clean["token_level_rewards"], noisy["token_level_rewards"])


def test_log_prob_difference_by_hand() -> None:
    train, rollout = torch.zeros(21), torch.cat([torch.full((19,), 0.1), torch.tensor([-0.5, 99.0])])
    found = log_prob_difference(train, rollout, torch.tensor([True] * 20 + [False]))
    assert found.mean_abs == pytest.approx((19 * 0.1 + 0.5) / 20)
    assert found.p95_abs == pytest.approx(0.1)
    assert found.max_abs == pytest.approx(0.5)
    ratio = np.exp(-np.array([0.1] * 19 + [-0.5]))
    assert found.kl == pytest.approx(np.mean(ratio - 1 - np.log(ratio)), rel=1e-5)


def test_equal_log_probs_differ_by_nothing_and_no_tokens_give_zero() -> None:
    same = log_prob_difference(torch.randn(5), torch.randn(5), torch.zeros(5, dtype=torch.bool))
    values = torch.randn(5)
    assert log_prob_difference(values, values, torch.ones(5, dtype=torch.bool)) == same
    assert (same.mean_abs, same.kl) == (0.0, 0.0)
