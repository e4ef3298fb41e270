"""Objectives: their formula, their gradient, and that nothing depends on how rows are cut."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import cuts, make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import KL_ESTIMATORS, PolicyObjective, SftObjective, loss_weights, ppo_clip
from rlsdk.interfaces import Batch, BatchError, ConfigError, Objective, ObjectiveResult, PolicyLossInputs

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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(KL_ESTIMATORS)))
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
        parts["policy_loss"] + 0.3 * parts["kl"] - 0.1 * parts["entropy"], expected, rtol=1e-4, atol=1e-5
    )


@settings(max_examples=50, deadline=None)
@given(steps())
def test_what_stands_off_the_mask_changes_nothing(batch: Batch) -> None:
    batch = weighed(batch)
    mask = batch["response_mask"]
    names = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "entropy")
    noise = {name: torch.where(mask, batch[name], torch.randn(batch.num_tokens) * 50) for name in names}
    clean, clean_gradient = run(FULL, batch)
    noisy, noisy_gradient = run(FULL, batch.with_tokens(**noise))
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
