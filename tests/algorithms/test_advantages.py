"""Advantage estimators: by hand, against plain loops, by property, and that nothing off the mask matters."""

from collections.abc import Callable
from functools import partial

import plain_advantages as plain
import pytest
import torch
from algorithm_cases import flat, make_batch, plain_rows, poison, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk import algorithms as alg
from rlsdk.interfaces import SCHEMA, Batch, BatchError, ConfigError, reads_of
from rlsdk.registry import ComponentKind, Registry

Estimator = Callable[[Batch], Batch]
ESTIMATORS: dict[str, tuple[Estimator, Callable[[plain.Rows], plain.Numbers]]] = {
    "grpo": (alg.grpo, plain.grpo),
    "grpo_batch": (partial(alg.grpo, scale="batch"), plain.grpo_batch),
    "grpo_without_deviation": (partial(alg.grpo, normalize_std=False), plain.dr_grpo),
    "dr_grpo": (alg.dr_grpo, plain.dr_grpo),
    "grpo_passk": (alg.grpo_passk, plain.grpo_passk),
    "rloo": (alg.rloo, plain.rloo),
    "opo": (alg.opo, plain.opo),
    "gpg": (alg.gpg, plain.gpg),
    "reinforce": (partial(alg.reinforce, gamma=0.9), plain.reinforce),
    "remax": (alg.remax, plain.remax),
    "reinforce_plus_plus": (partial(alg.reinforce_plus_plus, gamma=0.9), plain.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": (alg.reinforce_plus_plus_baseline, plain.reinforce_plus_plus_baseline),
    "gae": (partial(alg.gae, gamma=0.9, lam=0.7), plain.gae),
}
CENTRED = ("grpo", "grpo_batch", "dr_grpo", "rloo")
OF_GROUPS = (*CENTRED, "grpo_passk", "opo", "gpg")


def per_row(batch: Batch) -> list[float]:
    """The advantage that stands on the last token of each row."""
    return batch["advantages"][batch.offsets[1:] - 1].tolist()


def estimate(name: str, batch: Batch) -> torch.Tensor:
    return ESTIMATORS[name][0](batch)["advantages"]


# By hand


def test_grpo_by_hand() -> None:
    batch = alg.grpo(make_batch([1.0, 0.0, 0.0, 1.0, 5.0, 1.0], [0, 0, 0, 0, 1, 1]), eps=0.0)
    half = 0.5 / (1 / 3) ** 0.5
    assert per_row(batch) == pytest.approx([half, -half, -half, half, 2**-0.5, -(2**-0.5)])


def test_grpo_with_the_deviation_of_the_batch_by_hand() -> None:
    """Rewards 0, 1, 2, 5: mean 2, squares 4 + 1 + 0 + 9 = 14, deviation sqrt(14 / 3)."""
    batch = alg.grpo(make_batch([0.0, 1.0, 2.0, 5.0], [0, 0, 1, 1]), scale="batch", eps=0.0)
    spread = (14 / 3) ** 0.5
    assert per_row(batch) == pytest.approx([-0.5 / spread, 0.5 / spread, -1.5 / spread, 1.5 / spread])


def test_rloo_by_hand() -> None:
    assert per_row(alg.rloo(make_batch([1.0, 0.0, 0.5, 7.0], [3, 3, 3, 1]))) == pytest.approx([0.75, -0.75, 0.0, 0.0])


def test_passk_rewards_a_single_best_by_its_lead() -> None:
    batch = make_batch([3.0, 1.0, 0.5, 2.0, 2.0, 9.0], [0, 0, 0, 1, 1, 2])
    assert per_row(alg.grpo_passk(batch, normalize_std=False)) == pytest.approx([2.0, 0, 0, 0, 0, 0])


def test_opo_weighs_the_baseline_by_length() -> None:
    batch = make_batch([1.0, 0.0], [0, 0], [(1, 1), (1, 3)])
    assert per_row(alg.opo(batch)) == pytest.approx([0.75, -0.25])


def test_gpg_makes_up_for_groups_without_signal() -> None:
    """Four rows, two of them in a group whose rewards differ: alpha is 2."""
    batch = make_batch([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    assert per_row(alg.gpg(batch)) == pytest.approx([1.0, -1.0, 0.0, 0.0])
    assert per_row(alg.gpg(batch, f_norm=2.0)) == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_reinforce_discounts_by_response_token_and_steps_over_a_tools() -> None:
    batch = make_batch([8.0], [0], [(1, 4)])
    batch = batch.with_tokens(response_mask=torch.tensor([False, True, False, True, True]))
    found = alg.reinforce(batch, gamma=0.5)
    assert found["returns"].tolist() == [0.0, 2.0, 0.0, 4.0, 8.0]
    assert torch.equal(found["returns"], found["advantages"])


def test_remax_takes_the_greedy_score_off_and_leaves_out_a_row_without_one() -> None:
    batch = make_batch([1.0, 1.0], [0, 0], baseline_scores=[0.25, float("nan")])
    assert alg.remax(batch)["advantages"].tolist() == [0, 0.75, 0.75, 0, 0, 0]


def test_gae_by_hand() -> None:
    """gamma .5, lambda .5; values 1, 2; rewards 0, 4: d = (0 + 1 - 1, 4 - 2), A = (0 + .25 * 2, 2), R = (1.5, 4)."""
    batch = make_batch([4.0], [0]).with_tokens(values=torch.tensor([9.0, 1.0, 2.0]))
    found = alg.gae(batch, gamma=0.5, lam=0.5, normalize=False)
    assert found["advantages"].tolist() == [0.0, 0.5, 2.0]
    assert found["returns"].tolist() == [0.0, 1.5, 4.0]
    long_sighted = alg.gae(batch, gamma=0.5, lam=0.5, critic_lam=1.0, normalize=False)
    assert long_sighted["advantages"].tolist() == [0.0, 0.5, 2.0]
    assert long_sighted["returns"].tolist() == [0.0, 2.0, 4.0]


def test_reinforce_plus_plus_by_hand() -> None:
    """Tokens -1, -1, 1, 1: mean 0, variance 4 / 3."""
    found = alg.reinforce_plus_plus(make_batch([-1.0, 1.0], [0, 1]))["advantages"]
    assert found[[1, 2, 4, 5]].tolist() == pytest.approx([-(0.75**0.5)] * 2 + [0.75**0.5] * 2)
    found = alg.reinforce_plus_plus_baseline(make_batch([5.0, 7.0, 3.0], [0, 0, 1]))["advantages"]
    assert found.tolist() == pytest.approx([0, *[-(0.75**0.5)] * 2, 0, *[0.75**0.5] * 2, 0, 0, 0])


# Against plain loops


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_equals_a_plain_loop_over_rows_and_tokens(batch: Batch, name: str) -> None:
    found = estimate(name, batch)
    assert found.dtype == torch.float32
    assert not found[~batch["response_mask"]].any()
    assert not found[~batch["valid"][batch.row_of_token]].any()
    # The plain loops round where equal rewards of the batch do not: gpg then sees a difference of 1e-17.
    torch.testing.assert_close(found, flat(batch, ESTIMATORS[name][1](plain_rows(batch))), rtol=2e-4, atol=2e-5)


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from([0.0, 0.7, 1.0]))
def test_returns_of_gae_and_of_the_monte_carlo_estimators(batch: Batch, lam: float) -> None:
    rows = plain_rows(batch)
    found = alg.gae(batch, gamma=0.9, lam=0.3, critic_lam=lam)["returns"]
    torch.testing.assert_close(found, flat(batch, plain.gae_returns(rows, lam)), rtol=1e-4, atol=1e-5)
    expected = flat(batch, [plain.returns(row, 0.9) for row in rows])
    torch.testing.assert_close(alg.reinforce(batch, gamma=0.9)["returns"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alg.reinforce_plus_plus(batch, gamma=0.9)["returns"], expected, rtol=1e-4, atol=1e-5)


def test_long_rows_need_no_loop_and_lose_no_digits() -> None:
    """100,000 tokens at gamma 1: the return of the first token is the sum of all rewards."""
    batch = make_batch([1.0, -1.0], [0, 1], [(1, 100_000), (1, 7)])
    batch = batch.with_tokens(token_level_rewards=torch.where(batch["response_mask"], 0.1, 0.0))
    found = alg.reinforce(batch)["returns"]
    assert float(found[1]) == pytest.approx(10_000.0, rel=1e-6)
    assert float(found[100_002]) == pytest.approx(0.7, rel=1e-6)


def test_with_lambda_one_and_no_critic_gae_is_reinforce() -> None:
    batch = make_batch([1.0, 2.0], [0, 1], [(1, 3), (2, 2)])
    found = alg.gae(batch.with_tokens(values=torch.zeros(batch.num_tokens)), gamma=0.8, normalize=False)
    torch.testing.assert_close(found["advantages"], alg.reinforce(batch, gamma=0.8)["advantages"])


# Properties


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(CENTRED))
def test_a_group_sums_to_zero_over_its_valid_rows(batch: Batch, name: str) -> None:
    answered = batch.row_sum(batch["response_mask"].long()) > 0
    rows = torch.where(answered, torch.tensor(per_row(ESTIMATORS[name][0](batch))), 0.0).double()
    for uid in batch["uid"].unique().tolist():
        members = (batch["uid"] == uid) & batch["valid"]
        if bool(answered[members].all()):
            assert abs(float(rows[members].sum())) < 1e-4


@settings(max_examples=50, deadline=None)
@given(st.data(), steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_the_order_of_rows_does_not_matter(data: st.DataObject, batch: Batch, name: str) -> None:
    order = data.draw(st.permutations(range(batch.num_rows)))
    shuffled = ESTIMATORS[name][0](batch.select(order))["advantages"]
    torch.testing.assert_close(shuffled, ESTIMATORS[name][0](batch).select(order)["advantages"], rtol=1e-5, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_what_a_row_that_is_not_valid_scored_changes_nothing(batch: Batch, name: str) -> None:
    usable = batch["valid"][batch.row_of_token]
    poisoned = batch.with_tokens(
        **{field: torch.where(usable, batch[field], torch.nan) for field in ("token_level_rewards", "values")}
    )
    assert torch.equal(estimate(name, poisoned), estimate(name, batch))


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(ESTIMATORS)))
def test_what_stands_off_the_mask_changes_nothing_not_even_nan(batch: Batch, name: str) -> None:
    noisy = poison(batch, "token_level_rewards", "values")
    assert torch.equal(estimate(name, noisy), estimate(name, batch))


@pytest.mark.parametrize("score", [0.1, 1.0, -3.3, 1e-8, 1e8])
@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(score: float, size: int) -> None:
    lengths = [(1, 1 + row % 5) for row in range(size)]
    for name in OF_GROUPS:
        assert not estimate(name, make_batch([score] * size, [5] * size, lengths)).any(), name


def test_one_valid_row_among_others_gives_zero() -> None:
    batch = make_batch([1.0, 0.0, 0.0], [0, 0, 0], valid=[True, False, False])
    for name in OF_GROUPS:
        assert per_row(ESTIMATORS[name][0](batch)) == [0.0, 0.0, 0.0]


def test_a_batch_without_validity_counts_every_row() -> None:
    batch = make_batch([1.0, 0.0], [0, 0])
    rows = {name: tensor for name, tensor in batch.rows.items() if name != "valid"}
    bare = Batch(lengths=batch.lengths, tokens=batch.tokens, rows=rows)
    assert torch.equal(alg.grpo(bare)["advantages"], alg.grpo(batch)["advantages"])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_batch_of_no_rows_stays_one(name: str) -> None:
    batch = make_batch([1.0], [0], baseline_scores=[0.0]).with_tokens(values=torch.zeros(3))
    assert len(estimate(name, batch.select(slice(0, 0)))) == 0


# Names, declarations, errors


def test_every_registered_estimator_is_tested_here_and_declares_what_it_reads() -> None:
    """Given the promised fields and the declared ones, and no others, each does its work."""
    registry = Registry.discover({})
    names = registry.usable(ComponentKind.ADVANTAGE)
    assert set(names) == set(ESTIMATORS) - {"grpo_batch", "grpo_without_deviation"}
    baseline = torch.zeros(2, dtype=torch.float64)
    batch = make_batch([1.0, 0.0], [7, 7], baseline_scores=baseline).with_tokens(values=torch.zeros(6))
    always = ("token_level_rewards", "response_mask")
    for name in names:
        estimator = registry.function(ComponentKind.ADVANTAGE, name)
        declared = reads_of(estimator).fields
        assert set(declared) <= set(SCHEMA)
        estimator(batch.keep((*always, *declared))).validate(["advantages"])


def test_a_field_that_is_missing_is_named() -> None:
    batch = make_batch([1.0], [0])
    with pytest.raises(BatchError, match="no field 'values'"):
        alg.gae(batch)
    with pytest.raises(BatchError, match="no field 'baseline_scores'"):
        alg.remax(batch)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: alg.grpo(b, scale="grop"), r"scale is 'grop'; did you mean 'group'\?"),
        (lambda b: alg.gpg(b, f_norm=0.0), "f_norm is 0.0"),
        (lambda b: alg.reinforce(b, gamma=1.1), "gamma is 1.1"),
        (lambda b: alg.gae(b, lam=-0.1), "lam is -0.1"),
        (lambda b: alg.gae(b, critic_lam=2.0), "critic_lam is 2.0"),
    ],
)
def test_options_out_of_range_are_refused(call: Callable[[Batch], Batch], message: str) -> None:
    batch = make_batch([1.0], [0]).with_tokens(values=torch.zeros(3))
    with pytest.raises(ConfigError, match=message):
        call(batch)
