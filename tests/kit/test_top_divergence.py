"""The divergence over a teacher's most probable tokens and the rest: a lower bound of the whole one, which the sum over
those tokens alone is not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.divergence import divergence, most_probable, top_divergence

BETAS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
SHARP, SEEDS = st.floats(0.1, 8.0), st.integers(0, 2**31)


def logits_of(tokens: int, size: int, sharp: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy and of a teacher, and a slope, float64."""
    generator = torch.Generator().manual_seed(seed)
    policy, teacher = (sharp * torch.randn(tokens, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return policy, teacher, torch.randn(tokens, generator=generator, dtype=torch.float64)


def plain(policy: Tensor, teacher: Tensor, count: int, beta: float) -> Tensor:
    """The formulas of arXiv 2306.13649 with the probabilities of k + 1 categories."""
    ids = teacher.topk(count, -1).indices
    taken = torch.zeros_like(policy, dtype=torch.bool).scatter(-1, ids, True)

    def categories(logits: Tensor) -> Tensor:
        chances = logits.softmax(-1)
        rest = torch.where(taken, 0.0, chances).sum(-1, keepdim=True)
        return torch.cat([chances.gather(-1, ids), rest], -1)[..., : count + (count < policy.shape[-1])]

    q, p = categories(policy), categories(teacher)
    if beta in (0.0, 1.0):
        return (q * (q / p).log()).sum(-1) if beta else (p * (p / q).log()).sum(-1)
    mean = beta * p + (1 - beta) * q
    return beta * (p * (p / mean).log()).sum(-1) + (1 - beta) * (q * (q / mean).log()).sum(-1)


@given(
    tokens=st.integers(0, 4), size=st.integers(2, 40), share=st.floats(0, 1), beta=BETAS, sharp=st.floats(0.1, 3.0),
    seed=SEEDS,
)  # fmt: skip
def test_value_and_gradient_are_those_of_the_formula_in_float64(
    tokens: int, size: int, share: float, beta: float, sharp: float, seed: int
) -> None:
    policy, teacher, slope = logits_of(tokens, size, sharp, seed)
    policy.requires_grad_()
    count = max(round(share * size), 1)
    found = top_divergence(policy, *most_probable(teacher, count), beta)
    expected = plain(policy, teacher, count, beta)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    gradients = [torch.autograd.grad((slope * value).sum(), policy)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@given(size=st.integers(2, 40), share=st.floats(0, 1), beta=BETAS, sharp=SHARP, seed=SEEDS)
def test_it_is_a_lower_bound_that_grows_with_the_tokens(
    size: int, share: float, beta: float, sharp: float, seed: int
) -> None:
    policy, teacher, _ = logits_of(5, size, sharp, seed)
    count = max(round(share * size), 1)
    whole = divergence(policy, teacher, beta)
    found = top_divergence(policy, *most_probable(teacher, count), beta)
    fewer = top_divergence(policy, *most_probable(teacher, max(count - 1, 1)), beta)
    assert (found >= -1e-12).all()
    assert (found <= whole + 1e-9).all()
    assert (fewer <= found + 1e-9).all()


@given(size=st.integers(2, 40), beta=BETAS, sharp=SHARP, seed=SEEDS)
def test_with_all_tokens_it_is_the_whole_divergence(size: int, beta: float, sharp: float, seed: int) -> None:
    policy, teacher, slope = logits_of(4, size, sharp, seed)
    policy.requires_grad_()
    found, whole = top_divergence(policy, *most_probable(teacher, size), beta), divergence(policy, teacher, beta)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)
    gradients = [torch.autograd.grad((slope * value).sum(), policy)[0] for value in (found, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@given(beta=BETAS, seed=SEEDS, beyond=st.integers(1, 6))
def test_tokens_that_the_policy_lacks_count_to_the_rest(beta: float, seed: int, beyond: int) -> None:
    policy, teacher, _ = logits_of(3, 9, 1.0, seed)
    ids, log_probs = most_probable(teacher, 9)
    lost = ids >= 9 - beyond
    kept = torch.where(lost, 10_000 + ids, ids)
    found = top_divergence(policy, kept, log_probs, beta)
    assert found.isfinite().all()
    assert (found >= -1e-12).all()
    assert (found <= divergence(policy, teacher, beta) + 1e-9).all()


def test_emptying_the_tokens_lowers_the_sum_over_them_and_not_the_divergence() -> None:
    """Of a teacher with 90 % on two tokens, and a policy that gives them less and less."""
    teacher = torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64).log()
    ids, top = most_probable(teacher, 2)
    found, naive = [], []
    for left in (0.9, 0.5, 0.2, 0.02):
        policy = torch.tensor([[left * 2 / 3, left / 3, (1 - left) / 2, (1 - left) / 2]], dtype=torch.float64).log()
        found.append(float(top_divergence(policy, ids, top, 1.0)))
        logs = policy.gather(-1, ids)
        naive.append(float((logs.exp() * (logs - top)).sum()))
    assert found == sorted(found)
    assert found[0] == pytest.approx(0.0, abs=1e-9)
    assert min(naive) < -0.3
    assert naive[0] == pytest.approx(0.0, abs=1e-9)


@given(beta=BETAS, seed=SEEDS, far=st.floats(20.0, 5000.0))
def test_far_apart_it_is_finite_in_float32(beta: float, seed: int, far: float) -> None:
    policy, teacher, _ = (one.float() for one in logits_of(4, 12, 1.0, seed))
    policy = (far * policy).requires_grad_()
    found = top_divergence(policy, *most_probable(far * teacher, 5), beta)
    assert found.isfinite().all()
    assert torch.autograd.grad(found.sum(), policy)[0].isfinite().all()


def test_more_tokens_than_there_are_is_an_error() -> None:
    for count in (0, 5):
        with pytest.raises(ConfigError, match=rf"top_k {count}: expected 1 to the 4 tokens"):
            most_probable(torch.zeros(1, 4), count)
