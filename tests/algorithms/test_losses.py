"""Policy losses: by hand, against plain Python, and their gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import plain_losses
import pytest
import torch
from algorithm_cases import make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import cispo, gspo, losses, policy_gradient, ppo_clip, sapo
from rlsdk.interfaces import Batch, ConfigError, PolicyLossInputs
from rlsdk.registry import ComponentKind, Registry

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "policy_gradient": {},
}


def inputs_of(batch: Batch, log_probs: Tensor | None = None) -> PolicyLossInputs:
    """As the objective makes them: 0 off the mask."""
    mask = batch["response_mask"]
    current = batch["log_probs"] if log_probs is None else log_probs
    return PolicyLossInputs(
        log_probs=torch.where(mask, current, 0.0),
        old_log_probs=torch.where(mask, batch["old_log_probs"], 0.0).to(current.dtype),
        advantages=torch.where(mask, batch["advantages"], 0.0).to(current.dtype),
        mask=mask,
        batch=batch,
    )


def run(name: str, inputs: PolicyLossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    found: tuple[Tensor, Mapping[str, Tensor]] = getattr(losses, name)(inputs, **OPTIONS[name])
    return found


def tokens(ratios: list[float], advantages: list[float]) -> PolicyLossInputs:
    """One row of a prompt token and a response with these ratios."""
    batch = make_batch([0.0], [0], [(1, len(ratios))])
    log_probs = torch.tensor([0.0, *np.log(ratios)], dtype=torch.float32)
    return inputs_of(
        batch.with_tokens(
            log_probs=log_probs, old_log_probs=torch.zeros(len(log_probs)), advantages=torch.tensor([0.0, *advantages])
        )
    )


# By hand


def test_ppo_by_hand_in_each_of_the_six_cases() -> None:
    loss, metrics = ppo_clip(tokens([1.5, 0.5, 1.0, 1.5, 0.5, 1.0], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0]))
    assert loss[1:].tolist() == pytest.approx([-2.4, -1.0, -2.0, 3.0, 1.6, 2.0])
    assert metrics["clip_fraction"][1:].tolist() == [1, 0, 0, 0, 1, 0]
    assert metrics["ratio"][1:].tolist() == pytest.approx([1.5, 0.5, 1.0, 1.5, 0.5, 1.0])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    loss, metrics = ppo_clip(tokens([9.0, 9.0, 2.0], [-1.0, 1.0, -1.0]), dual_clip=3.0)
    assert loss[1:].tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert metrics["clip_fraction"][1:].tolist() == [1, 1, 0]


def test_a_higher_upper_clip_lets_good_tokens_rise_further() -> None:
    loss, _ = ppo_clip(tokens([1.25, 0.75], [1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    assert loss[1:].tolist() == pytest.approx([-1.25, 0.8])


def test_gspo_gives_all_tokens_the_geometric_mean_of_their_ratios() -> None:
    """Ratios 2 and 1/2: the response's ratio is 1, and nothing is clipped."""
    loss, metrics = gspo(tokens([2.0, 0.5], [1.0, 1.0]))
    assert loss[1:].tolist() == pytest.approx([-1.0, -1.0])
    assert not metrics["clip_fraction"].any()
    loss, metrics = gspo(tokens([1.21, 1.0], [1.0, -1.0]), clip_low=0.05, clip_high=0.05)
    assert loss[1:].tolist() == pytest.approx([-1.05, 1.1])
    assert metrics["clip_fraction"][1:].tolist() == [1, 0]
    assert metrics["ratio"][1:].tolist() == pytest.approx([1.1, 1.1])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    log_probs = torch.tensor([0.0, np.log(9.0), np.log(0.1)], dtype=torch.float32).requires_grad_()
    batch = make_batch([0.0], [0]).with_tokens(old_log_probs=torch.zeros(3), advantages=torch.tensor([0, 1.0, -1.0]))
    loss, metrics = cispo(inputs_of(batch, log_probs))
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -5.0, 0.1])
    assert metrics["clip_fraction"].tolist() == [0, 1, 0]


def test_sapo_has_slope_one_at_ratio_one_and_fades_far_away() -> None:
    log_probs = torch.tensor([0.0, 0.0, 3.0, -9.0]).requires_grad_()
    batch = make_batch([0.0], [0], [(1, 3)])
    batch = batch.with_tokens(old_log_probs=torch.zeros(4), advantages=torch.tensor([0.0, 1.0, 1.0, 1.0]))
    loss, metrics = sapo(inputs_of(batch, log_probs))
    assert loss[1].item() == pytest.approx(-2.0)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[1].item() == pytest.approx(-1.0)
    assert abs(log_probs.grad[2].item()) < 1e-6
    assert metrics["clip_fraction"].tolist() == [0, 0, 1, 0]


# Against plain Python, and gradients


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(OPTIONS)))
def test_equals_plain_python(batch: Batch, name: str) -> None:
    inputs = inputs_of(batch)
    loss, metrics = run(name, inputs)
    np.testing.assert_allclose(loss.numpy(), plain_losses.losses(name, inputs, **OPTIONS[name]), rtol=1e-4, atol=1e-5)
    assert {"ratio", "clip_fraction", "approx_kl"} <= set(metrics)
    assert all(values.shape == loss.shape and not values.requires_grad for values in metrics.values())


@settings(max_examples=50, deadline=None)
@given(steps(), st.floats(0.05, 1.0), st.floats(0.05, 2.0), st.none() | st.floats(1.1, 4.0))
def test_ppo_equals_plain_python_for_any_bounds(batch: Batch, low: float, high: float, dual: float | None) -> None:
    options = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    inputs = inputs_of(batch)
    expected = plain_losses.losses("ppo_clip", inputs, **options)
    np.testing.assert_allclose(ppo_clip(inputs, **options)[0].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ppo_clip", "sapo", "policy_gradient"])
@settings(max_examples=3, deadline=None)
@given(batch=steps())
def test_gradcheck(name: str, batch: Batch) -> None:
    """Analytic against numeric gradients, where nothing is detached on purpose."""
    log_probs = batch["log_probs"].double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: run(name, inputs_of(batch, x))[0], (log_probs,), eps=1e-7, atol=1e-4, raise_exception=True
    )


@settings(max_examples=50, deadline=None)
@given(steps())
def test_the_gradient_of_gspo_is_that_of_the_papers_sequence_form(batch: Batch) -> None:
    """With one advantage per row, GSPO-token's gradient summed with weights 1 / length is that of min(sA, clip(s)A)."""
    per_row = batch.row_sum(batch["advantages"])
    batch = batch.with_tokens(advantages=per_row[batch.row_of_token])
    mask, length = batch["response_mask"], batch.row_sum(batch["response_mask"].double()).clamp(min=1)
    token_form = batch["log_probs"].double().requires_grad_()
    loss, _ = gspo(inputs_of(batch, token_form), clip_low=0.05, clip_high=0.1)
    (torch.where(mask, loss, 0.0) / length[batch.row_of_token]).sum().backward()
    row_form = batch["log_probs"].double().requires_grad_()
    ratio = (batch.row_sum(torch.where(mask, row_form - batch["old_log_probs"], 0.0)) / length).exp()
    (-torch.minimum(ratio * per_row, ratio.clamp(0.95, 1.1) * per_row))[batch.row_sum(mask.long()) > 0].sum().backward()
    torch.testing.assert_close(token_form.grad, row_form.grad, rtol=1e-4, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(steps())
def test_the_gradient_of_cispo_is_the_weighed_score_function(batch: Batch) -> None:
    log_probs = batch["log_probs"].clone().requires_grad_()
    inputs = inputs_of(batch, log_probs)
    loss, _ = run("cispo", inputs)
    loss.sum().backward()
    ratio = (inputs.log_probs - inputs.old_log_probs).detach().exp()
    torch.testing.assert_close(log_probs.grad, -inputs.advantages * ratio.clamp(0.8, 1.3))


@settings(max_examples=50, deadline=None)
@given(steps())
def test_the_gradient_of_ppo_is_that_of_the_closed_formula(batch: Batch) -> None:
    """d loss / d log_prob = -A r where no clip is in force, and 0 where one is."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    inputs = inputs_of(batch, log_probs)
    loss, metrics = ppo_clip(inputs, dual_clip=3.0)
    loss.sum().backward()
    free = (metrics["clip_fraction"] == 0) & batch["response_mask"]
    torch.testing.assert_close(log_probs.grad, torch.where(free, -inputs.advantages * metrics["ratio"], 0.0))


# Properties


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(OPTIONS)))
def test_no_advantage_no_gradient(batch: Batch, name: str) -> None:
    """What `zero_without_advantage` promises."""
    assert getattr(losses, name).zero_without_advantage
    silent = torch.where(torch.rand(batch.num_tokens) < 0.5, 0.0, batch["advantages"])
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, _ = run(name, inputs_of(batch.with_tokens(advantages=silent), log_probs))
    loss.sum().backward()
    assert log_probs.grad is not None
    assert not log_probs.grad[silent == 0].any()
    assert not loss[silent == 0].any()


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(sorted(OPTIONS)))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(batch: Batch, name: str) -> None:
    """At ratio 1 nothing is clipped: the gradient is -A."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    inputs = inputs_of(batch.with_tokens(old_log_probs=batch["log_probs"]), log_probs)
    loss, metrics = run(name, inputs)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -inputs.advantages)
    assert not metrics["clip_fraction"].any()
    assert not metrics["approx_kl"].any()


def test_approx_kl_estimates_the_kl_from_the_old_policy() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 8, generator=generator).log_softmax(1)
    batch = make_batch([0.0], [0], [(1, 8)])
    pad = torch.zeros(1)
    batch = batch.with_tokens(
        log_probs=torch.cat([pad, new]), old_log_probs=torch.cat([pad, old]), advantages=torch.zeros(9)
    )
    exact = (old.exp() * (old - new)).sum()
    for name in OPTIONS:
        metrics = run(name, inputs_of(batch))[1]
        assert torch.isclose((old.exp() * metrics["approx_kl"][1:]).sum(), exact, atol=1e-6)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("gap", [1e4, -1e4, float("inf"), -float("inf")])
def test_extreme_ratios_stay_finite(name: str, gap: float) -> None:
    """Also where the old policy gave a token no probability at all, or the current one does."""
    batch = make_batch([0.0], [0], [(1, 2)])
    batch = batch.with_tokens(old_log_probs=torch.tensor([0.0, -gap, 0.0]), advantages=torch.tensor([0.0, 1.0, -1.0]))
    log_probs = torch.tensor([0.0, -1.0, -1.0], requires_grad=True)
    loss, metrics = run(name, inputs_of(batch, log_probs))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: ppo_clip(i, clip_low=0.0), "clip_low is 0.0"),
        (lambda i: ppo_clip(i, clip_low=1.1), "clip_low is 1.1"),
        (lambda i: ppo_clip(i, clip_high=0.0), "clip_high is 0.0"),
        (lambda i: ppo_clip(i, dual_clip=1.0), "dual_clip is 1.0"),
        (lambda i: gspo(i, clip_low=-1.0), "clip_low is -1.0"),
        (lambda i: cispo(i, clip_low=2.0), "clip_low is 2.0"),
        (lambda i: cispo(i, clip_high=-0.5), "clip_high is -0.5"),
        (lambda i: sapo(i, tau_negative=0.0), "tau_negative is 0.0"),
    ],
)
def test_bounds_out_of_range_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(tokens([1.0], [1.0]))


def test_every_registered_loss_is_tested_here() -> None:
    registry = Registry.discover({})
    found = {registry.function(ComponentKind.LOSS, name) for name in registry.usable(ComponentKind.LOSS)}
    assert found == {getattr(losses, name) for name in OPTIONS}
    assert registry.function(ComponentKind.LOSS, "gpg") is policy_gradient
