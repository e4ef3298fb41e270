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


def shared_out(teacher: Tensor, ends: Tensor, policy: Tensor, policy_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Shares a teacher's log-probs out over the policy's tokens of the same text, whose boundaries differ.

    Between two boundaries that both have, the sums are equal: the probability that the teacher gives to this piece of
    the text. Within a piece it is shared out in proportion to the policy's own log-probs, so that no token is preferred
    where both give the piece the same probability; evenly where these are 0.

    Args:
        teacher: `[m]`: log-probs of the teacher's tokens, nats.
        ends: `[m]` int64, not falling: bytes of the text up to the end of each.
        policy: `[n]`: log-probs of the policy's tokens.
        policy_ends: `[n]` int64, not falling; both texts end with the same byte, or the policy's before.

    Returns:
        `[n]`: the teacher's log-prob of each token, NaN behind the last boundary that both have; and `[n]` bool:
        whether a token ends at a boundary that both have.
    """
    common = torch.unique(policy_ends[torch.isin(policy_ends, ends)])
    if not len(common):
        return torch.full_like(policy, float("nan")), torch.zeros_like(policy_ends, dtype=torch.bool)
    piece, of_teacher = (torch.searchsorted(common, one) for one in (policy_ends, ends))
    size = len(common) + 1  # The last piece is behind the last common boundary.
    sums = policy.new_zeros(size, dtype=torch.float64).index_add(0, of_teacher, teacher.double())
    own = policy.new_zeros(size, dtype=torch.float64).index_add(0, piece, policy.double())
    count = torch.bincount(piece, minlength=size)
    share = torch.where(own[piece] < 0, policy.double() / own[piece], 1.0 / count[piece])
    given = (sums[piece] * share).masked_fill(piece == len(common), float("nan"))
    return given.to(policy.dtype), torch.isin(policy_ends, common)


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
