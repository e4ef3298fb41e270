"""Advantage estimators: how much better a response was than what was to be expected.

Each reads `token_level_rewards`, `response_mask`, `uid` (and `valid`, where the batch has it) of a whole step and adds
`advantages`, flat `[N]` float32, 0 off the mask. Groups are the rows of equal `uid`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch


def valid_rows(batch: Batch) -> Tensor:
    """`[B]` bool: rows whose reward can be used; all of them where the batch does not say."""
    if "valid" in batch:
        return batch["valid"]
    return torch.ones(batch.num_rows, dtype=torch.bool, device=batch.lengths.device)


def outcome_rewards(batch: Batch) -> Tensor:
    """`[B]` float64: sum of each row's `token_level_rewards` over its response; 0 on rows that are not valid."""
    rewards = torch.where(batch["response_mask"], batch["token_level_rewards"], 0.0)
    return torch.where(valid_rows(batch), batch.row_sum(rewards.double()), 0.0)


@dataclass(frozen=True)
class _Groups:
    """Statistics of each row's group over its valid rows, per row: `[B]` float64."""

    centred: Tensor
    """Outcome less the group's mean; exactly 0 where all outcomes of a group are equal, and on rows not valid."""
    size: Tensor
    """Valid rows in the group."""
    squares: Tensor
    """Sum of the squared `centred` of the group."""


def _groups(batch: Batch) -> _Groups:
    """Equal float32 outcomes add up without rounding in float64, so `centred` is exactly 0 for a group of them."""
    outcome = outcome_rewards(batch)
    valid = valid_rows(batch).double()
    uids, group = torch.unique(batch["uid"], return_inverse=True)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(uids)).index_add(0, group, values)[group]

    size = total(valid)
    centred = (outcome - total(outcome) / size.clamp(min=1)) * valid
    return _Groups(centred=centred, size=size, squares=total(centred.square()))


def _on_responses(batch: Batch, per_row: Tensor) -> Batch:
    """Writes a number per row `[B]` on that row's response tokens."""
    spread = per_row.float()[batch.row_of_token]
    return batch.with_tokens(advantages=torch.where(batch["response_mask"], spread, 0.0))


def grpo(batch: Batch, *, normalize_std: bool = True, eps: float = 1e-6) -> Batch:
    """Group-relative advantages: `(r - mean(group)) / (std(group) + eps)`.

    DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), outcome supervision, section 4.1.2. The paper leaves the kind of
    standard deviation open; this is the sample one (divisor n - 1), as `torch.std` and the public implementations have
    it. Differences: rows that are not valid belong to no group and get 0; a group with fewer than two valid rows, or
    with equal rewards, gets 0.

    Args:
        batch: a whole step, groups unbroken.
        normalize_std: False leaves out the division: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), to go with the
            loss aggregation `sequence_sum`.
        eps: added to the standard deviation, in units of reward.

    Returns:
        The batch with `advantages`.
    """
    groups = _groups(batch)
    advantages = groups.centred
    if normalize_std:
        deviation = (groups.squares / (groups.size - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + eps)
    return _on_responses(batch, torch.where(groups.size > 1, advantages, 0.0))


def rloo(batch: Batch) -> Batch:
    """Leave-one-out advantages: reward less the mean reward of the group's other valid rows.

    Ahmadian et al. 2024 (arXiv 2402.14740), equation 8, in the equal form `n / (n - 1) * (r - mean(group))`. Rows that
    are not valid, and rows that are alone in their group, get 0.

    Args:
        batch: a whole step, groups unbroken.

    Returns:
        The batch with `advantages`.
    """
    groups = _groups(batch)
    others = (groups.size - 1).clamp(min=1)
    return _on_responses(batch, torch.where(groups.size > 1, groups.centred * groups.size / others, 0.0))
