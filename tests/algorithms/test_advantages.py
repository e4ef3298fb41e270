"""Advantage estimators, by hand, by property, and against the papers' formulas in numpy."""

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import grpo, rloo
from rlsdk.algorithms.advantages import outcome_rewards
from rlsdk.interfaces import Batch


def per_row(batch: Batch) -> list[float]:
    """The advantage that stands on the last token of each row."""
    return batch["advantages"][batch.offsets[1:] - 1].tolist()


def in_numpy(batch: Batch, estimator: str) -> np.ndarray:
    """Row by row, straight from the papers."""
    rewards, uid, valid = outcome_rewards(batch).numpy(), batch["uid"].numpy(), batch["valid"].numpy()
    out = np.zeros(batch.num_rows)
    for row in np.flatnonzero(valid):
        group = rewards[(uid == uid[row]) & valid]
        if len(group) < 2:
            continue
        if estimator == "rloo":
            others = (group.sum() - rewards[row]) / (len(group) - 1)
            out[row] = rewards[row] - others
        elif estimator == "dr_grpo":
            out[row] = rewards[row] - group.mean()
        else:
            out[row] = (rewards[row] - group.mean()) / (group.std(ddof=1) + 1e-6)
    return out


ESTIMATORS = {"grpo": grpo, "dr_grpo": lambda b: grpo(b, normalize_std=False), "rloo": rloo}


def test_grpo_by_hand() -> None:
    batch = grpo(make_batch([1.0, 0.0, 0.0, 1.0, 5.0, 1.0], [0, 0, 0, 0, 1, 1]), eps=0.0)
    half = 0.5 / (1 / 3) ** 0.5
    assert per_row(batch) == pytest.approx([half, -half, -half, half, 2**-0.5, -(2**-0.5)])


def test_rloo_by_hand() -> None:
    assert per_row(rloo(make_batch([1.0, 0.0, 0.5, 7.0], [3, 3, 3, 1]))) == pytest.approx([0.75, -0.75, 0.0, 0.0])


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_every_row_gets_what_the_paper_says_on_its_response_and_zero_elsewhere(batch: Batch, name: str) -> None:
    advantages = ESTIMATORS[name](batch)["advantages"]
    expected = torch.from_numpy(in_numpy(batch, name)).float()[batch.row_of_token] * batch["response_mask"]
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_a_group_sums_to_zero_over_its_valid_rows(batch: Batch, name: str) -> None:
    rows = torch.tensor(per_row(ESTIMATORS[name](batch))).double()
    sums = torch.zeros(4, dtype=torch.float64).index_add(0, batch["uid"], rows)
    assert sums.abs().max() < 1e-5


@settings(max_examples=100, deadline=None)
@given(st.data(), steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_the_order_of_rows_does_not_matter(data: st.DataObject, batch: Batch, name: str) -> None:
    order = data.draw(st.permutations(range(batch.num_rows)))
    shuffled = ESTIMATORS[name](batch.select(order))["advantages"]
    torch.testing.assert_close(shuffled, ESTIMATORS[name](batch).select(order)["advantages"], rtol=1e-6, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_what_a_row_that_is_not_valid_scored_changes_nothing(batch: Batch, name: str) -> None:
    poisoned = torch.where(batch["valid"][batch.row_of_token], batch["token_level_rewards"], torch.nan)
    estimate = ESTIMATORS[name]
    assert torch.equal(
        estimate(batch.with_tokens(token_level_rewards=poisoned))["advantages"], estimate(batch)["advantages"]
    )


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_rewards_off_the_mask_change_nothing(batch: Batch, name: str) -> None:
    noise = torch.where(batch["response_mask"], batch["token_level_rewards"], 1e6)
    estimate = ESTIMATORS[name]
    assert torch.equal(
        estimate(batch.with_tokens(token_level_rewards=noise))["advantages"], estimate(batch)["advantages"]
    )


@pytest.mark.parametrize("score", [0.1, 1.0, -3.3, 1e-8, 1e8])
@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(score: float, size: int) -> None:
    for estimate in ESTIMATORS.values():
        assert not estimate(make_batch([score] * size, [5] * size))["advantages"].any()


def test_one_valid_row_among_others_gives_zero() -> None:
    batch = make_batch([1.0, 0.0, 0.0], [0, 0, 0], valid=[True, False, False])
    for estimate in ESTIMATORS.values():
        assert per_row(estimate(batch)) == [0.0, 0.0, 0.0]


def test_a_batch_without_validity_counts_every_row() -> None:
    batch = make_batch([1.0, 0.0], [0, 0])
    rows = {name: tensor for name, tensor in batch.rows.items() if name != "valid"}
    bare = Batch(lengths=batch.lengths, tokens=batch.tokens, rows=rows)
    assert torch.equal(grpo(bare)["advantages"], grpo(batch)["advantages"])


def test_group_identities_may_be_any_numbers() -> None:
    small = grpo(make_batch([1.0, 0.0, 2.0, 1.0], [0, 0, 1, 1]))
    large = grpo(make_batch([1.0, 0.0, 2.0, 1.0], [-(10**15), -(10**15), 7, 7]))
    assert torch.equal(small["advantages"], large["advantages"])
