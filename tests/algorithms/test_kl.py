"""KL estimators against the exact KL of small distributions, and their gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.algorithms import KL_ESTIMATORS
from rlsdk.algorithms.kl import kl_estimator
from rlsdk.interfaces import ConfigError

NUMBERS = st.floats(-8, 0, width=32)


def distributions(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a policy (with gradient) and a reference over 6 tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), ref.log_softmax(0)


@given(NUMBERS, NUMBERS)
def test_values_by_hand(policy: float, reference: float) -> None:
    d = torch.tensor(policy).item() - torch.tensor(reference).item()
    expected = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}
    for name, estimate in KL_ESTIMATORS.items():
        found = estimate(torch.tensor([policy]), torch.tensor([reference])).item()
        assert found == pytest.approx(expected[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    logits, ref = distributions()
    log_probs = logits.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - ref)).sum()
    assert torch.isclose((log_probs.exp() * KL_ESTIMATORS[name](log_probs, ref)).sum(), exact)


def expected_gradient(name: str) -> torch.Tensor:
    """Over tokens sampled from the policy, of the estimator as a loss."""
    logits, ref = distributions()
    weight = logits.detach().softmax(0)
    (weight * KL_ESTIMATORS[name](logits.log_softmax(0), ref)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_as_a_loss_k1_teaches_nothing_k2_the_reverse_and_k3_the_forward_kl() -> None:
    logits, ref = distributions()
    log_probs = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - log_probs)).sum(), logits)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2"), reverse)
    torch.testing.assert_close(expected_gradient("k3"), forward)


@given(NUMBERS, NUMBERS)
def test_k2_k3_and_abs_are_never_negative(policy: float, reference: float) -> None:
    for name in ("k2", "k3", "abs"):
        assert KL_ESTIMATORS[name](torch.tensor([policy]), torch.tensor([reference])).item() >= -1e-7


def test_k3_keeps_the_digits_of_small_differences() -> None:
    found = KL_ESTIMATORS["k3"](torch.tensor([1e-3]), torch.tensor([0.0])).item()
    assert found == pytest.approx(math.expm1(-1e-3) + 1e-3, rel=1e-3)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_extreme_log_probs_give_finite_numbers_and_gradients(name: str) -> None:
    log_probs = torch.tensor([-1000.0, 0.0, -50.0], requires_grad=True)
    value = KL_ESTIMATORS[name](log_probs, torch.tensor([0.0, -1000.0, -50.0]))
    value.sum().backward()
    assert value.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_an_unknown_estimator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"KL estimator 'k33' does not exist; did you mean 'k3'\?; choose one of"):
        kl_estimator("k33")
