"""Advantages from teachers: how much more probable the sampled token is to each teacher than to the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch


@dataclass(frozen=True, kw_only=True)
class TeacherLogProbs:
    """One teacher's log-probs of a batch's tokens."""

    log_probs: Tensor
    """`[N]` float32, nats; read where `taught`."""
    taught: Tensor
    """`[N]` bool: sampled tokens that it teaches."""
    weight: float = 1.0


def gap(policy: Tensor, teacher: TeacherLogProbs) -> Tensor:
    """`[N]`: log p_policy - log p_teacher of the sampled token, in nats; 0 where it is not taught.

    Over tokens that the policy sampled, its mean estimates the reverse KL from the policy to the teacher, KL(policy ||
    teacher), without bias; a single value may be negative.
    """
    return torch.where(teacher.taught, policy - teacher.log_probs, 0.0)


def add_teacher_advantages(
    batch: Batch, policy: Tensor, teachers: Sequence[TeacherLogProbs], *, coef: float = 1.0, reward_coef: float = 1.0
) -> Batch:
    """`advantages` = reward_coef * advantages + coef * sum over teachers of weight * (log p_teacher - log p_policy).

    No gradient flows through the gap: with a policy-gradient loss, and samples of the current policy, the expected
    gradient of the second term is that of -coef * weight * KL(policy || teacher) at each token's state, the state taken
    as given (discount 0: Lu et al., On-Policy Distillation, Thinking Machines, 2025; the reverse KL of Agarwal et al.,
    arXiv 2306.13649, estimated at the sampled token).

    Args:
        batch: with `advantages`.
        policy: `[N]` float32: the policy's log-probs of the tokens before this step's updates.
        teachers: those of the run.
        coef: of the teachers' part.
        reward_coef: of the advantages in the batch.
    """
    advantages = reward_coef * batch["advantages"].double()
    for teacher in teachers:
        if teacher.weight:
            advantages = advantages - coef * teacher.weight * gap(policy, teacher).double()
    return batch.with_tokens(advantages=advantages.float())
