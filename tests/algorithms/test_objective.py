"""Objectives: their formula, their gradient, and that nothing depends on how rows are cut."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import cuts, make_batch, poison, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import (
    KL_ESTIMATORS,
    PolicyObjective,
    SftObjective,
    correct_rollout,
    loss_weights,
    ppo_clip,
    update_means,
)
from rlsdk.interfaces import Batch, BatchError, ConfigError, Objective, ObjectiveResult, PolicyLossInputs, reads
from rlsdk.registry import ComponentKind, Registry

REGISTRY = Registry.discover({})
FULL = PolicyObjective(kl_coef=0.3, kl_estimator="k3", entropy_coef=0.1, loss_options={"clip_low": 0.1})


def weighed(batch: Batch, aggregation: str = "token_mean") -> Batch:
    return batch.with_tokens(loss_weight=loss_weights(batch, aggregation, max_tokens=8))


def run(objective: Objective, batch: Batch) -> tuple[ObjectiveResult, Tensor]:
    """The result, and the gradient on the log-probs."""
    outputs = {name: batch[name].clone().requires_grad_() for name in objective.outputs}
    result = objective(outputs, batch)
    result.loss.backward()
    assert outputs["log_probs"].grad is not None
    return result, outputs["log_probs"].grad


def reinforce(inputs: PolicyLossInputs, *, scale: float = 1.0) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A loss as a user writes one."""
    return -scale * inputs.advantages * inputs.log_probs, {"seen": torch.ones_like(inputs.advantages)}


@settings(max_examples=50, deadline=None)
@given(st.data(), steps(), st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]))
def test_micro_batches_add_up_to_the_mini_batch(data: st.DataObject, batch: Batch, aggregation: str) -> None:
    batch = weighed(batch, aggregation)
    whole, gradient = run(FULL, batch)
    parts = data.draw(cuts(batch.num_rows))
    results = [run(FULL, batch.select(part)) for part in parts]
    torch.testing.assert_close(sum(r.loss for r, _ in results), whole.loss, rtol=1e-4, atol=1e-5)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(r.sums[name] for r, _ in results), value, rtol=1e-4, atol=1e-5)
    for name, value in whole.maxima.items():
        assert max(float(r.maxima[name]) for r, _ in results) == pytest.approx(float(value))
    for (_, part_gradient), rows in zip(results, parts, strict=True):
        torch.testing.assert_close(part_gradient, gradient[batch.token_index(rows)], rtol=1e-4, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from(sorted(KL_ESTIMATORS.keys() - {"k1"})))
def test_the_loss_is_the_weighed_sum_of_its_parts(batch: Batch, estimator: str) -> None:
    batch = weighed(batch)
    objective = replace(FULL, kl_estimator=estimator)
    result, _ = run(objective, batch)
    mask, weight = batch["response_mask"], batch["loss_weight"]
    inputs = PolicyLossInputs(
        log_probs=batch["log_probs"],
        old_log_probs=batch["old_log_probs"],
        advantages=batch["advantages"],
        mask=mask,
        batch=batch,
    )
    loss, _ = ppo_clip(inputs, clip_low=0.1)
    kl = KL_ESTIMATORS[estimator](batch["log_probs"], batch["ref_log_probs"])
    expected = (weight * (loss + 0.3 * kl - 0.1 * batch["entropy"]))[mask].sum()
    torch.testing.assert_close(result.loss.detach(), expected, rtol=1e-4, atol=1e-5)
    parts = result.sums
    torch.testing.assert_close(
        parts["policy_loss"] + parts["kl_loss"] + parts["entropy_loss"], expected, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(parts["kl"] * 0.3, parts["kl_loss"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts["entropy"] * -0.1, parts["entropy_loss"], rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(REGISTRY.usable(ComponentKind.LOSS))))
def test_what_stands_off_the_mask_changes_nothing_not_even_nan(batch: Batch, name: str) -> None:
    """For every registered loss, with everything switched on."""
    loss = REGISTRY.function(ComponentKind.LOSS, name)
    objective = PolicyObjective(loss=loss, kl_coef=0.3, entropy_coef=0.1)
    batch = correct_rollout(weighed(batch))
    mask = batch["response_mask"]
    noisy_batch = poison(
        batch,
        *("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "entropy"),
        *("rollout_weight", "loss_weight"),
    )
    clean, clean_gradient = run(objective, batch)
    noisy, noisy_gradient = run(objective, noisy_batch)
    assert torch.equal(clean.loss, noisy.loss)
    assert torch.equal(clean_gradient, noisy_gradient)
    assert not noisy_gradient[~mask].any()
    assert clean.sums == noisy.sums
    assert clean.maxima == noisy.maxima


@pytest.mark.parametrize("how", ["absent", "flag"])
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_reinforce(how: str) -> None:
    batch = weighed(make_batch([1.0, 0.0], [0, 0], [(2, 3), (1, 4)]))
    log_probs = -torch.rand(batch.num_tokens) * 9
    batch = batch.with_tokens(log_probs=log_probs, advantages=torch.randn(batch.num_tokens))
    if how == "flag":
        batch = batch.with_tokens(old_log_probs=torch.zeros(batch.num_tokens))
    result, gradient = run(PolicyObjective(on_policy=how == "flag"), batch)
    torch.testing.assert_close(gradient, -batch["advantages"] * batch["loss_weight"])
    assert float(result.sums["ratio"]) == pytest.approx(1.0)
    assert float(result.maxima["log_ratio"]) == 0.0
    assert not result.sums["clip_fraction"]


def test_the_difference_to_the_rollout_engine_is_reported_where_it_is_known() -> None:
    batch = weighed(make_batch([1.0], [0], [(1, 2)]))
    batch = batch.with_tokens(
        log_probs=torch.tensor([0.0, -1.0, -2.0]),
        rollout_log_probs=torch.tensor([0.0, -1.5, -1.9]),
        advantages=torch.ones(3),
    )
    result, _ = run(PolicyObjective(), batch)
    assert float(result.sums["rollout_difference"]) == pytest.approx(0.3)
    assert float(result.maxima["rollout_difference"]) == pytest.approx(0.5)
    without, _ = run(PolicyObjective(), batch.keep(["response_mask", "loss_weight", "advantages", "log_probs"]))
    assert "rollout_difference" not in without.sums


def test_metrics_carry_no_gradient() -> None:
    batch = weighed(make_batch([1.0], [0], [(1, 2)])).with_tokens(
        log_probs=torch.zeros(3), ref_log_probs=torch.ones(3), advantages=torch.ones(3), entropy=torch.ones(3)
    )
    result, _ = run(FULL, batch)
    assert not any(torch.as_tensor(v).requires_grad for v in [*result.sums.values(), *result.maxima.values()])


def test_entropy_is_asked_for_only_when_it_is_used() -> None:
    assert tuple(PolicyObjective().outputs) == ("log_probs",)
    assert tuple(FULL.outputs) == ("log_probs", "entropy")
    assert isinstance(FULL, Objective)


def test_a_user_loss_by_name_or_as_a_function_with_its_options() -> None:
    batch = weighed(make_batch([1.0], [0], [(1, 2)]))
    batch = batch.with_tokens(log_probs=-torch.rand(3), advantages=torch.ones(3))
    losses: list[Any] = [reinforce, "test_objective:reinforce"]
    found = [run(PolicyObjective(loss=loss, loss_options={"scale": 2.0}), batch) for loss in losses]
    for result, gradient in found:
        torch.testing.assert_close(gradient, torch.tensor([0.0, -1.0, -1.0]))
        assert float(result.sums["seen"]) == pytest.approx(1.0)


@pytest.mark.parametrize("objective", [FULL, PolicyObjective(loss=reinforce), SftObjective()])
def test_objectives_survive_pickling(objective: Any) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective


@pytest.mark.parametrize("loss", ["rlsdk.algorithms.losses:nothing", "no_such_module:fn", "nonsense"])
def test_a_loss_that_cannot_be_loaded_is_refused_by_name(loss: str) -> None:
    batch = weighed(make_batch([1.0], [0])).with_tokens(log_probs=torch.zeros(3), advantages=torch.ones(3))
    with pytest.raises(ConfigError, match=f"policy loss '{loss}' cannot be loaded"):
        run(PolicyObjective(loss=loss), batch)


def test_a_missing_reference_is_named() -> None:
    batch = weighed(make_batch([1.0], [0])).with_tokens(log_probs=torch.zeros(3), advantages=torch.ones(3))
    with pytest.raises(BatchError, match="no field 'ref_log_probs'"):
        run(PolicyObjective(kl_coef=0.1), batch)


def test_a_batch_of_no_rows_gives_zero() -> None:
    batch = weighed(make_batch([1.0], [0])).with_tokens(log_probs=torch.zeros(3), advantages=torch.ones(3))
    result, _ = run(PolicyObjective(), batch.select(slice(0, 0)))
    assert float(result.loss.detach()) == 0.0
    assert float(result.maxima["log_ratio"]) == 0.0


def test_sft_is_the_mean_negative_log_likelihood_of_the_answer() -> None:
    batch = weighed(make_batch([0.0, 0.0], [0, 1], [(1, 1), (1, 3)]))
    batch = batch.with_tokens(log_probs=torch.tensor([-9.0, -1.0, -9.0, -2.0, -3.0, -4.0]))
    result, gradient = run(SftObjective(), batch)
    assert float(result.loss.detach()) == pytest.approx(2.5)
    assert gradient.tolist() == pytest.approx([0, -0.25, 0, -0.25, -0.25, -0.25])


# What a loss declares, it gets


@reads("uid", "truncated", outputs=("entropy",))
def reader(inputs: PolicyLossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A loss that reads fields and outputs beyond the usual ones."""
    assert inputs.entropy is not None
    cut = inputs.batch["truncated"][inputs.batch.row_of_token]
    sign = inputs.batch["uid"].sign()[inputs.batch.row_of_token]
    return inputs.entropy * sign * ~cut, {}


reader.whole_groups = True  # type: ignore[attr-defined]


def test_a_loss_gets_the_fields_and_outputs_that_it_declares() -> None:
    """Of a batch that was cut down to `fields`, as the trainer does it; they were dropped before."""
    objective = PolicyObjective(loss=reader)
    assert tuple(objective.outputs) == ("log_probs", "entropy")
    assert {"uid", "truncated"} <= set(objective.fields)
    assert objective.whole_groups
    batch = weighed(make_batch([1.0, 0.0, 0.0], [7, -7, 7], truncated=[False, False, True]))
    sent = batch.with_tokens(advantages=torch.ones(9)).keep(objective.fields)
    result = objective({"log_probs": torch.zeros(9), "entropy": torch.arange(9.0)}, sent)
    assert float(result.loss) == pytest.approx((1 + 2 - 4 - 5) / 6)
    assert float(result.sums["entropy"]) == pytest.approx((1 + 2 + 4 + 5 + 7 + 8) / 6)


@settings(max_examples=30, deadline=None)
@given(steps(), st.sampled_from(sorted(REGISTRY.usable(ComponentKind.LOSS))), st.booleans())
def test_no_objective_reads_more_than_its_fields(batch: Batch, name: str, full: bool) -> None:
    options: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.1} if full else {}
    objective = PolicyObjective(loss=REGISTRY.function(ComponentKind.LOSS, name), **options)
    batch = correct_rollout(weighed(batch))
    outputs = {name: batch[name] for name in objective.outputs}
    cut = objective(outputs, batch.keep(objective.fields))
    assert torch.equal(cut.loss, objective(outputs, batch).loss)


def test_an_undeclared_loss_asks_for_the_usual_fields_only() -> None:
    usual = {"response_mask", "loss_weight", "advantages", "old_log_probs", "rollout_log_probs", "rollout_weight"}
    assert set(PolicyObjective().fields) == usual
    assert set(PolicyObjective(kl_coef=0.1).fields) == {*usual, "ref_log_probs"}
    assert not PolicyObjective().whole_groups


# Metrics do not depend on which rows were left out


def skipping(batch: Batch) -> Batch:
    """Only the rows that have an advantage somewhere."""
    signal = batch.row_sum(torch.where(batch["response_mask"], batch["advantages"], 0.0).abs()) > 0
    return batch.select(signal.nonzero()[:, 0])


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]))
def test_rows_left_out_change_no_metric_and_no_loss(batch: Batch, aggregation: str) -> None:
    """The clip fraction was .314 with, and .063 without the rows that have no advantage."""
    quiet = torch.rand(batch.num_rows) < 0.5
    batch = batch.with_tokens(advantages=torch.where(quiet[batch.row_of_token], 0.0, batch["advantages"]))
    batch = weighed(batch, aggregation)
    whole, _ = run(PolicyObjective(), batch)
    part, _ = run(PolicyObjective(), skipping(batch))
    torch.testing.assert_close(part.loss, whole.loss, rtol=1e-4, atol=1e-5)
    expected = update_means([floats(whole)])
    assert update_means([floats(part)]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, value in whole.maxima.items():
        assert float(part.maxima[name]) == pytest.approx(float(value))


def floats(result: ObjectiveResult) -> dict[str, float]:
    return {name: float(value) for name, value in result.sums.items()}


def test_where_rows_cannot_be_left_out_metrics_are_over_all_tokens() -> None:
    batch = weighed(make_batch([0.0, 0.0], [0, 0])).with_tokens(
        log_probs=torch.zeros(6),
        ref_log_probs=torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, 2.0]),
        advantages=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
    )
    found = update_means([floats(run(PolicyObjective(kl_coef=0.1, kl_estimator="abs"), batch)[0])])
    assert found["kl"] == pytest.approx(1.5)
    assert found["kl_loss"] == pytest.approx(0.15)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_sum"])
def test_the_parts_of_the_loss_are_normalised_like_the_loss(aggregation: str) -> None:
    """Over several mini-batches of unequal size; means are not distorted by an aggregation that does not add up to
    1."""
    batches = [
        weighed(make_batch([0.0] * n, [0] * n, [(1, n)] * n), aggregation).with_tokens(
            **{name: torch.full((n * (n + 1),), value) for name, value in ALL_FIELDS.items()}
        )
        for n in (1, 3)
    ]
    results = [run(FULL, batch)[0] for batch in batches]
    means = update_means([floats(result) for result in results])
    mean_loss = sum(float(result.loss.detach()) for result in results) / 2
    assert means["policy_loss"] + means["kl_loss"] + means["entropy_loss"] == pytest.approx(mean_loss)
    assert means["entropy"] == pytest.approx(0.7)
    assert means["ratio"] == pytest.approx(1.0)
    assert not any(name.endswith("_weight") for name in means)


ALL_FIELDS = {"log_probs": -1.0, "old_log_probs": -1.0, "ref_log_probs": -1.5, "advantages": 2.0, "entropy": 0.7}


def test_update_means_by_hand() -> None:
    sums = [
        {"metric_weight": 1.0, "loss_weight": 1.0, "ratio": 1.0, "policy_loss": 0.5},
        {"metric_weight": 0.25, "loss_weight": 1.0, "ratio": 0.5, "policy_loss": -0.1, "seen": 0.5},
        {"metric_weight": 0.0, "loss_weight": 1.0, "ratio": 0.0, "policy_loss": 0.2},
    ]
    assert update_means(sums) == pytest.approx({"ratio": 1.2, "policy_loss": 0.2, "seen": 2.0})
    assert update_means(sums[2:]) == {"policy_loss": 0.2}
    assert update_means([]) == {}


# Correction for the sampler


@settings(max_examples=50, deadline=None)
@given(steps())
def test_the_decoupled_objective_of_three_policies(batch: Batch) -> None:
    """Gradient of `w clip-PPO`, w = proximal / behaviour without gradient; the penalty is not weighed."""
    batch = correct_rollout(weighed(batch.with_tokens(rollout_log_probs=batch["ref_log_probs"])), upper=1.5)
    mask, weight = batch["response_mask"], batch["loss_weight"]
    _, gradient = run(PolicyObjective(kl_coef=0.2, kl_estimator="k2"), batch)
    ratio = torch.where(mask, batch["log_probs"] - batch["old_log_probs"], 0.0).exp()
    behaviour = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp().clamp(max=1.5)
    cut = torch.where(batch["advantages"] > 0, ratio > 1.2, ratio < 0.8)
    of_loss = torch.where(cut, 0.0, -batch["advantages"] * ratio) * behaviour
    of_kl = 0.2 * (batch["log_probs"] - batch["ref_log_probs"])
    expected = torch.where(mask, (of_loss + of_kl) * weight, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_the_pretraining_term_is_weighed_with_its_coefficient() -> None:
    batch = weighed(make_batch([0.0], [0])).with_tokens(log_probs=torch.tensor([-9.0, -1.0, -2.0]))
    result, gradient = run(SftObjective(coef=0.4), batch)
    assert float(result.loss.detach()) == pytest.approx(0.6)
    assert gradient.tolist() == pytest.approx([0, -0.2, -0.2])
    assert update_means([floats(result)]) == pytest.approx({"nll": 1.5, "sft_loss": 0.6})
