"""Rewards per token, and the log-prob metrics."""

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import log_prob_difference, token_level_rewards
from rlsdk.algorithms.advantages import outcome_rewards
from rlsdk.algorithms.kl import KL_ESTIMATORS
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
    rewards = token_level_rewards(batch, kl_coef=0.1)["token_level_rewards"]
    assert rewards.tolist() == pytest.approx([0.0, -0.05, 1.1])


@settings(max_examples=100, deadline=None)
@given(steps(), st.floats(0, 1), st.sampled_from(sorted(KL_ESTIMATORS)))
def test_a_rows_rewards_add_up_to_its_score_less_its_penalty(batch: Batch, kl_coef: float, estimator: str) -> None:
    made = token_level_rewards(batch, kl_coef, estimator)
    kl = KL_ESTIMATORS[estimator](batch["old_log_probs"], batch["ref_log_probs"]).double()
    penalty = batch.row_sum(torch.where(batch["response_mask"], kl, 0.0))
    expected = torch.where(batch["valid"], batch["scores"].double() - kl_coef * penalty, 0.0)
    torch.testing.assert_close(outcome_rewards(made), expected, rtol=1e-4, atol=1e-4)
    assert not made["token_level_rewards"][~batch["response_mask"]].any()
    made.validate(["token_level_rewards"])


def test_rows_that_are_not_valid_get_zero_even_where_their_score_is_nan() -> None:
    batch = make_batch([float("nan"), 1.0], [0, 0], valid=[False, True])
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0, 0, 0, 0, 1.0]


def test_a_row_without_a_response_gets_nothing() -> None:
    batch = make_batch([3.0, 1.0], [0, 0], [(2, 0), (1, 1)])
    assert token_level_rewards(batch)["token_level_rewards"].tolist() == [0, 0, 0, 1.0]


def test_without_old_log_probs_the_rollouts_serve() -> None:
    batch = make_batch([0.0], [0]).with_tokens(rollout_log_probs=torch.ones(3), ref_log_probs=torch.zeros(3))
    assert token_level_rewards(batch, 0.5)["token_level_rewards"].tolist() == [0, -0.5, -0.5]


def test_a_penalty_without_a_reference_is_refused_by_name() -> None:
    batch = make_batch([0.0], [0]).with_tokens(rollout_log_probs=torch.ones(3))
    with pytest.raises(BatchError, match="no field 'ref_log_probs'"):
        token_level_rewards(batch, 0.5)


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
