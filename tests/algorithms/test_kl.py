"""KL estimators against the exact KL of small distributions, and their gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.algorithms import KL_ESTIMATORS, KlController, PolicyObjective, kl_estimator, loss_kl_estimator
from rlsdk.interfaces import ConfigError
from rlsdk.registry import ComponentKind, Registry

NUMBERS = st.floats(-8, 0, width=32)


def distributions(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a policy (with gradient) and a reference over 6 tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), ref.log_softmax(0)


@given(NUMBERS, NUMBERS)
def test_values_by_hand(policy: float, reference: float) -> None:
    d = torch.tensor(policy).item() - torch.tensor(reference).item()
    tangent = math.exp(5) - 6 + (-d - 5) * (math.exp(5) - 1)
    k3 = math.exp(-d) - 1 + d if d >= -5 else tangent
    expected = {"k1": d, "k2": d * d / 2, "k3": k3, "abs": abs(d), "low_var_kl": min(k3, 10)}
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
    for name in ("k2", "k3", "abs", "low_var_kl"):
        assert KL_ESTIMATORS[name](torch.tensor([policy]), torch.tensor([reference])).item() >= -1e-7


def test_k3_keeps_the_digits_of_small_differences() -> None:
    found = KL_ESTIMATORS["k3"](torch.tensor([1e-3]), torch.tensor([0.0])).item()
    assert found == pytest.approx(math.expm1(-1e-3) + 1e-3, rel=1e-3)


@pytest.mark.parametrize("difference", [1e-5, -1e-5])
def test_the_gradient_of_k3_keeps_the_digits_of_small_differences(difference: float) -> None:
    log_probs = torch.tensor([difference], requires_grad=True)
    KL_ESTIMATORS["k3"](log_probs, torch.zeros(1)).backward()
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(-math.expm1(-difference), rel=0.01)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_extreme_log_probs_give_finite_numbers_and_gradients(name: str) -> None:
    log_probs = torch.tensor([-1000.0, 0.0, -50.0], requires_grad=True)
    value = KL_ESTIMATORS[name](log_probs, torch.tensor([0.0, -1000.0, -50.0]))
    value.sum().backward()
    assert value.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value", "slope"), [("k3", math.inf, 1.0), ("low_var_kl", 10.0, 0.0), ("abs", math.inf, 1.0)]
)
def test_an_impossible_token_has_an_infinite_penalty_and_a_finite_gradient(
    name: str, value: float, slope: float
) -> None:
    """The reference gives the sampled token no probability at all; the other token is not touched."""
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = KL_ESTIMATORS[name](log_probs, torch.tensor([-torch.inf, -2.0]))
    found.sum().backward()
    assert found.tolist() == [value, 0.0]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [slope, 0.0]


def test_an_unknown_estimator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"KL estimator 'k33' does not exist; did you mean 'k3'\?; choose one of"):
        kl_estimator("k33")


# Bounded, and fit for a loss or not


def test_k3_is_bounded_and_pulls_harder_the_further_the_policy_fell() -> None:
    """It was 4.9e8 at -20, and beyond that its gradient pushed the policy further away."""
    log_probs = torch.tensor([-4.0, -5.0, -6.0, -20.0, -40.0, -1e4], requires_grad=True)
    value = KL_ESTIMATORS["k3"](log_probs, torch.zeros(6))
    value.sum().backward()
    slope = math.exp(5) - 1
    assert value.tolist() == pytest.approx(
        [math.exp(4) - 5, math.exp(5) - 6, *(math.exp(5) - 6 + slope * (x - 5) for x in (6, 20, 40, 1e4))], rel=1e-5
    )
    assert value[3].item() < 2400
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([1 - math.exp(4), *[-slope] * 5], rel=1e-5)


def test_low_var_kl_is_cut_at_ten_and_has_no_gradient_there() -> None:
    log_probs = torch.tensor([-1.0, -20.0], requires_grad=True)
    value = KL_ESTIMATORS["low_var_kl"](log_probs, torch.zeros(2))
    value.sum().backward()
    assert value.tolist() == pytest.approx([math.e - 2, 10.0])
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([1 - math.e, 0.0])


@pytest.mark.parametrize("name", ["k2", "k3", "abs"])
def test_gradcheck(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = (torch.randn(20, dtype=torch.float64, generator=generator) * 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, torch.zeros(20, dtype=torch.float64)), log_probs)


def test_k1_is_refused_in_a_loss_with_the_reason() -> None:
    for make in (lambda: loss_kl_estimator("k1"), lambda: PolicyObjective(kl_coef=0.1, kl_estimator="k1")):
        with pytest.raises(ConfigError, match=r"'k1' cannot be used in a loss: its expected gradient is zero.*'k3'"):
            make()
    assert PolicyObjective(kl_estimator="k1").kl_coef == 0
    for name in sorted(KL_ESTIMATORS.keys() - {"k1"}):
        assert loss_kl_estimator(name) is KL_ESTIMATORS[name]


def test_an_own_estimator_is_taken_as_a_function_or_by_import_string() -> None:
    assert kl_estimator("rlsdk.algorithms.kl:k2") is KL_ESTIMATORS["k2"]
    assert kl_estimator(KL_ESTIMATORS["k3"]) is KL_ESTIMATORS["k3"]
    with pytest.raises(ConfigError, match=r"KL estimator 'no.such:thing' cannot be loaded"):
        kl_estimator("no.such:thing")


def test_the_registered_estimators_are_the_built_in_ones() -> None:
    registry = Registry.discover({})
    names = registry.usable(ComponentKind.KL_ESTIMATOR)
    assert {name: registry.function(ComponentKind.KL_ESTIMATOR, name) for name in names} == dict(KL_ESTIMATORS)


# The coefficient


def test_a_fixed_coefficient_stays() -> None:
    assert KlController(coef=0.1).after(5.0, 100) == KlController(coef=0.1)


@pytest.mark.parametrize(
    ("kl", "coef"), [(6.0, 0.2), (6.3, 0.2 * 1.0025), (60.0, 0.2 * 1.01), (0.0, 0.2 * 0.99), (float("nan"), 0.2)]
)
def test_an_adaptive_coefficient_follows_the_target(kl: float, coef: float) -> None:
    """256 samples over a horizon of 5120 are K = 0.05; the error is cut at 20 %."""
    controller = KlController(coef=0.2, target=6.0, horizon=5120.0)
    after = controller.after(kl, 256)
    assert after.coef == pytest.approx(coef)
    assert (after.target, after.horizon) == (6.0, 5120.0)


def test_the_coefficient_settles_where_the_kl_is_on_target() -> None:
    """A policy whose KL falls with the coefficient, kl = 1 / coef: coef goes to 1 / target."""
    controller = KlController(coef=1.0, target=4.0, horizon=1000.0)
    for _ in range(400):
        controller = controller.after(1 / controller.coef, 200)
    assert controller.coef == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": -0.1}, "kl coef is -0.1"),
        ({"coef": 0.1, "target": 0.0}, "kl target is 0.0"),
        ({"coef": 0.0, "target": 1.0}, "must start above 0"),
        ({"coef": 0.1, "horizon": 0.0}, "kl horizon is 0.0"),
    ],
)
def test_a_controller_out_of_range_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KlController(**options)
