"""The clipped surrogate: by hand, against numpy, and its gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import ppo_clip
from rlsdk.interfaces import Batch, ConfigError, PolicyLossInputs


def inputs_of(batch: Batch, log_probs: torch.Tensor | None = None) -> PolicyLossInputs:
    return PolicyLossInputs(
        log_probs=batch["log_probs"] if log_probs is None else log_probs,
        old_log_probs=batch["old_log_probs"],
        advantages=batch["advantages"],
        mask=batch["response_mask"],
        batch=batch,
    )


def tokens(ratios: list[float], advantages: list[float]) -> PolicyLossInputs:
    """One row of a prompt token and a response with these ratios."""
    batch = make_batch([0.0], [0], [(1, len(ratios))])
    log_probs = torch.tensor([0.0, *np.log(ratios)], dtype=torch.float32)
    return inputs_of(
        batch.with_tokens(
            log_probs=log_probs, old_log_probs=torch.zeros(len(log_probs)), advantages=torch.tensor([0.0, *advantages])
        )
    )


def in_numpy(inputs: PolicyLossInputs, low: float, high: float, dual: float | None) -> np.ndarray:
    """Equation 7 of PPO and equation 5 of dual-clip PPO, token by token."""
    out = []
    for current, old, a, on in zip(
        inputs.log_probs.tolist(), inputs.old_log_probs.tolist(), inputs.advantages.tolist(), inputs.mask, strict=True
    ):
        r = np.exp(current - old) if on else 1.0
        surrogate = min(r * a, min(max(r, 1 - low), 1 + high) * a)
        out.append(-(max(surrogate, dual * a) if dual is not None and a < 0 else surrogate))
    return np.array(out)


def test_by_hand_in_each_of_the_six_cases() -> None:
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


@settings(max_examples=150, deadline=None)
@given(steps(), st.floats(0.05, 1.0), st.floats(0.05, 2.0), st.none() | st.floats(1.1, 4.0))
def test_equals_the_published_formula(batch: Batch, low: float, high: float, dual: float | None) -> None:
    inputs = inputs_of(batch)
    loss, _ = ppo_clip(inputs, clip_low=low, clip_high=high, dual_clip=dual)
    np.testing.assert_allclose(loss.numpy(), in_numpy(inputs, low, high, dual), rtol=1e-4, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_the_gradient_is_that_of_the_closed_formula(batch: Batch) -> None:
    """d loss / d log_prob = -A r where no clip is in force, and 0 where one is."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, metrics = ppo_clip(inputs_of(batch, log_probs), dual_clip=3.0)
    loss.sum().backward()
    free = (metrics["clip_fraction"] == 0) & batch["response_mask"]
    expected = torch.where(free, -batch["advantages"] * metrics["ratio"], 0.0)
    torch.testing.assert_close(log_probs.grad, expected)


@settings(max_examples=50, deadline=None)
@given(steps())
def test_at_ratio_one_the_gradient_is_that_of_reinforce(batch: Batch) -> None:
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, metrics = ppo_clip(inputs_of(batch.with_tokens(old_log_probs=batch["log_probs"]), log_probs))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -batch["advantages"] * batch["response_mask"])
    assert not metrics["clip_fraction"].any()
    assert not metrics["approx_kl"].any()


def test_approx_kl_estimates_the_kl_from_the_old_policy() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 8, generator=generator).log_softmax(1)
    probabilities = old.exp()
    batch = make_batch([0.0], [0], [(1, 8)])
    pad = torch.zeros(1)
    _, metrics = ppo_clip(
        inputs_of(
            batch.with_tokens(
                log_probs=torch.cat([pad, new]), old_log_probs=torch.cat([pad, old]), advantages=torch.zeros(9)
            )
        )
    )
    exact = (probabilities * (old - new)).sum()
    assert torch.isclose((probabilities * metrics["approx_kl"][1:]).sum(), exact, atol=1e-6)


def test_garbage_off_the_mask_and_huge_ratios_stay_finite() -> None:
    inputs = tokens([1.0, 1.0], [1.0, -1.0])
    log_probs = torch.tensor([float("-inf"), 500.0, 500.0], requires_grad=True)
    wild = PolicyLossInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(3),
        advantages=inputs.advantages,
        mask=inputs.mask,
        batch=inputs.batch,
    )
    loss, metrics = ppo_clip(wild)
    assert loss.isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 0.0}, "clip_low is 0.0: expected a number above 0 and at most 1"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -0.1}, "clip_high is -0.1: expected a number above 0"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0: expected a number above 1"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
    ],
)
def test_bounds_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_clip(tokens([1.0], [1.0]), **options)
