"""Advantages from teachers, against the formulas: the gradient of the reverse KL, and sums with coefficients."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlsdk.algorithms import PolicyObjective
from rlsdk.algorithms.distillation import TeacherLogProbs, add_teacher_advantages, gap
from rlsdk.interfaces import Batch

LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "policy_gradient")


def every_token(vocabulary: int) -> Batch:
    """A row for each token of the vocabulary: one prompt token, and that token sampled."""
    batch = Batch.from_rows([[0, token] for token in range(vocabulary)])
    mask = batch.position_ids == 1
    return batch.with_tokens(response_mask=mask, advantages=torch.zeros(batch.num_tokens)).with_rows(
        uid=torch.arange(vocabulary)
    )


def on_tokens(values: torch.Tensor) -> torch.Tensor:
    """`[N]` of a batch of `every_token`: 0 on the prompts, these values on the sampled tokens."""
    return torch.stack([torch.zeros_like(values), values], dim=1).reshape(-1)


@pytest.mark.parametrize("loss", LOSSES)
@given(
    vocabulary=st.integers(2, 12),
    seed=st.integers(0, 2**31),
    coef=st.floats(0.1, 3.0),
    weight=st.floats(0.1, 3.0),
    sharpness=st.floats(0.1, 4.0),
)
def test_the_expected_update_is_the_gradient_of_the_reverse_kl(
    loss: str, vocabulary: int, seed: int, coef: float, weight: float, sharpness: float
) -> None:
    """Over all tokens, each with its probability: sum_v p(v) (log p(v) - log q(v)) by autograd, for every loss with a
    policy ratio."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = (sharpness * torch.randn(vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    policy, teacher = logits.log_softmax(-1), other.log_softmax(-1)
    batch = every_token(vocabulary)
    taught = TeacherLogProbs(log_probs=on_tokens(teacher), taught=batch["response_mask"], weight=weight)
    batch = add_teacher_advantages(batch, on_tokens(policy).detach(), [taught], coef=coef)
    batch = batch.with_tokens(loss_weight=on_tokens(policy.detach().exp()))
    objective = PolicyObjective(loss=f"rlsdk.algorithms.losses:{loss}", on_policy=True)
    (found,) = torch.autograd.grad(objective({"log_probs": on_tokens(policy)}, batch).loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(coef * weight * (policy.exp() * (policy - teacher)).sum(), logits)
    # Advantages are float32.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    mean = (policy.exp() * gap(on_tokens(policy), taught)[batch["response_mask"]]).sum()
    torch.testing.assert_close(mean, (policy.exp() * (policy - teacher)).sum(), rtol=1e-12, atol=1e-12)


@given(
    seed=st.integers(0, 2**31),
    weights=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), max_size=4),
    coef=st.floats(0.0, 3.0),
    reward_coef=st.floats(0.0, 3.0),
)
def test_teachers_add_up_beside_the_rewards(seed: int, weights: list[float], coef: float, reward_coef: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = every_token(9)
    count = batch.num_tokens
    policy, advantages = (torch.randn(count, generator=generator) for _ in range(2))
    batch = batch.with_tokens(advantages=torch.where(batch["response_mask"], advantages, 0.0))
    teachers = []
    for weight in weights:
        taught = batch["response_mask"] & (torch.rand(count, generator=generator) < 0.5)
        log_probs = torch.where(taught, torch.randn(count, generator=generator), float("nan"))
        teachers.append(TeacherLogProbs(log_probs=log_probs, taught=taught, weight=weight))
    found = add_teacher_advantages(batch, policy, teachers, coef=coef, reward_coef=reward_coef)["advantages"]
    for token in range(count):
        expected = reward_coef * float(batch["advantages"][token])
        for teacher in teachers:
            if teacher.taught[token]:
                expected += coef * teacher.weight * float(teacher.log_probs[token].double() - policy[token].double())
        assert float(found[token]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    nobody = [replace(teacher, taught=torch.zeros(count, dtype=torch.bool)) for teacher in teachers]
    same = add_teacher_advantages(batch, policy, nobody, coef=coef)["advantages"]
    assert torch.equal(same, batch["advantages"])
