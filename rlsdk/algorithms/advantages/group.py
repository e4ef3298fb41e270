"""Outcome estimators that compare the responses to one prompt: one advantage a sample, on all tokens of its response.

In all of them, invalid samples are ignored and get 0. The only valid sample of a group, and the samples of a group with
equal rewards (`rlsdk.algorithms.signal`), get exactly 0. (Some other implementations give a single one its plain
reward.) A sample of several rows is one entry of its group. Where chains have scores of their own (`chain_scores`),
each chain is an entry, and those of one number are a group: the first players of a prompt's samples, the second ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, Samples, outcome_rewards, with_advantages
from rlsdk.algorithms.signal import BEST, scores_differ
from rlsdk.interfaces import Batch, ConfigError, nearest, reads

SCALES = ("group", "batch")


@dataclass(frozen=True)
class _Outcomes:
    """Rewards, and statistics over the valid samples of each sample's group: all `[S]`, float64 unless noted."""

    samples: Samples
    reward: Tensor
    valid: Tensor
    """Bool."""
    groups: Groups
    size: Tensor
    """Number of valid samples in the group."""
    centred: Tensor
    """Reward minus the group's mean; exactly 0 if all rewards of a group are equal, and for invalid samples."""

    @property
    def comparable(self) -> Tensor:
        """Bool: valid samples of groups with at least two valid samples."""
        return self.valid & (self.size > 1)

    def group_sum(self, values: Tensor) -> Tensor:
        """Returns `[S]`: the sum over each sample's group."""
        return self.groups.sum(values)[self.groups.index]

    def on_tokens(self, advantages: Tensor) -> Batch:
        """Returns the batch with the advantage of each sample, `[S]`; 0 where it cannot be compared."""
        return with_advantages(self.samples, torch.where(self.comparable, advantages, 0.0))


def _outcomes(batch: Batch) -> _Outcomes:
    """Computes the statistics."""
    samples = Samples.scored(batch)
    reward, valid, groups = outcome_rewards(samples), samples.valid, samples.groups
    size = groups.sum(valid.double())[groups.index]
    mean = groups.sum(reward)[groups.index] / size.clamp(min=1)
    largest = groups.largest(torch.where(valid, reward, -torch.inf))
    smallest = groups.smallest(torch.where(valid, reward, torch.inf))
    differs = scores_differ(largest, smallest)[groups.index]
    centred = torch.where(valid & differs, reward - mean, 0.0)
    return _Outcomes(samples=samples, reward=reward, valid=valid, groups=groups, size=size, centred=centred)


def _group_deviation(outcomes: _Outcomes) -> Tensor:
    """Returns `[S]`: sample standard deviation (divisor n - 1) of each sample's group."""
    return (outcomes.group_sum(outcomes.centred.square()) / (outcomes.size - 1).clamp(min=1)).sqrt()


def _batch_deviation(outcomes: _Outcomes) -> Tensor:
    """Returns a scalar: sample standard deviation of all valid rewards."""
    rewards = outcomes.reward[outcomes.valid]
    return rewards.std() if len(rewards) > 1 else rewards.new_zeros(())


@reads("uid", "valid")
def grpo(batch: Batch, *, normalize_std: bool = True, scale: str = "group", eps: float = 1e-6) -> Batch:
    """Computes group-relative advantages: `(r - mean(group)) / (std + eps)`.

    DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), outcome supervision, section 4.1.2. The paper does not say which
    standard deviation; this is the sample one (divisor n - 1), as in `torch.std` and the public implementations.

    Args:
        batch: a whole step with complete groups.
        normalize_std: divide by the standard deviation. False: see `dr_grpo`.
        scale: the standard deviation to divide by: of the `group`, or of the `batch`, that is of all valid rewards of
            the step (Lite PPO, Liu et al. 2025, arXiv 2508.08221). The latter does not inflate the advantages of groups
            whose rewards are nearly equal.
        eps: added to the standard deviation, in units of reward.

    Returns:
        The batch with `advantages`.

    Raises:
        ConfigError: `scale` is unknown, or `eps` is below 0.
    """
    _check_eps(eps)
    if scale not in SCALES:
        raise ConfigError(f"scale is {scale!r}{nearest(scale, SCALES)}; choose one of {list(SCALES)}")
    outcomes = _outcomes(batch)
    advantages = outcomes.centred
    if normalize_std:
        deviation = _group_deviation(outcomes) if scale == "group" else _batch_deviation(outcomes)
        advantages = advantages / (deviation + eps)
    return outcomes.on_tokens(advantages)


def _check_eps(eps: float) -> None:
    if not 0 <= eps < torch.inf:
        raise ConfigError(f"eps is {eps!r}: expected a number of at least 0, such as 1e-6")


@reads("uid", "valid")
def dr_grpo(batch: Batch) -> Batch:
    """Computes `r - mean(group)`, without the division that gives easy and hard prompts more weight.

    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), section 3.1; use it with the loss aggregation `sequence_sum`.

    Args:
        batch: a whole step with complete groups.

    Returns:
        The batch with `advantages`.
    """
    return grpo(batch, normalize_std=False)


@reads("uid", "valid")
def grpo_passk(batch: Batch, *, normalize_std: bool = True, eps: float = 1e-6) -> Batch:
    """Computes advantages for pass@k: a group's best sample gets `r_max - r_second`, every other one 0.

    Tang et al. 2025 (arXiv 2503.19595): for the objective "maximum reward of k samples", the leave-one-out baseline of
    a sample is the maximum reward of the others. So only a unique best sample has an advantage; tied best ones get 0.

    Args:
        batch: a whole step with complete groups.
        normalize_std: divide by the group's sample standard deviation plus `eps`, as in GRPO; not in the paper.
        eps: added to the standard deviation, in units of reward.

    Returns:
        The batch with `advantages`.

    Raises:
        ConfigError: `eps` is below 0.
    """
    _check_eps(eps)
    outcomes = _outcomes(batch)
    groups, rewards = outcomes.groups, torch.where(outcomes.valid, outcomes.reward, -torch.inf)
    best = groups.largest(rewards)[groups.index]
    is_best = outcomes.valid & ~scores_differ(best, rewards)
    is_single = outcomes.comparable & is_best & (outcomes.group_sum(is_best.double()) == 1)
    second = groups.largest(torch.where(is_best, -torch.inf, rewards))[groups.index]
    advantages = torch.where(is_single, outcomes.reward - second, 0.0)
    if normalize_std:
        # A single best sample differs from another one, so its group has a deviation, also where eps is 0.
        advantages = torch.where(is_single, advantages / (_group_deviation(outcomes) + eps), 0.0)
    return with_advantages(outcomes.samples, advantages)


grpo_passk.compares = BEST  # type: ignore[attr-defined]


@reads("uid", "valid")
def rloo(batch: Batch) -> Batch:
    """Computes leave-one-out advantages: reward minus the mean reward of the group's other valid samples.

    Ahmadian et al. 2024 (arXiv 2402.14740), equation 8, in the equivalent form `n / (n - 1) * (r - mean(group))`.

    Args:
        batch: a whole step with complete groups.

    Returns:
        The batch with `advantages`.
    """
    outcomes = _outcomes(batch)
    advantages = outcomes.centred * outcomes.size / (outcomes.size - 1).clamp(min=1)
    return outcomes.on_tokens(advantages)


@reads("uid", "valid")
def opo(batch: Batch) -> Batch:
    """Computes reward minus the length-weighted mean reward of the group: `r - sum(l r) / sum(l)`, l = response tokens.

    On-policy optimization (Hao et al. 2025, arXiv 2505.23585): the baseline with minimum variance if the squared norm
    of a response's score function is proportional to its length. Intended for exactly on-policy updates.

    Args:
        batch: a whole step with complete groups.

    Returns:
        The batch with `advantages`; exactly 0 in a group of equal rewards.
    """
    outcomes = _outcomes(batch)
    length = torch.where(outcomes.valid, outcomes.samples.lengths.double(), 0.0)
    # Uses centred rewards, so that equal rewards give exactly 0; subtracting the mean does not change the result.
    shift = outcomes.group_sum(length * outcomes.centred) / outcomes.group_sum(length).clamp(min=1)
    return outcomes.on_tokens(outcomes.centred - shift)


@reads("uid", "valid")
def gpg(batch: Batch, *, f_norm: float = 1.0) -> Batch:
    """Computes `alpha * (r - mean(group)) / f_norm`, with `alpha = samples / samples in groups whose rewards differ`.

    Group policy gradient (Chu et al. 2025, arXiv 2504.02546): alpha makes up for samples without gradient, whose group
    has equal rewards. It counts valid samples of groups with at least two of them. (verl counts nonzero rewards
    instead, which agrees with the paper only by chance.) Use it with the loss `gpg`.

    Args:
        batch: a whole step with complete groups.
        f_norm: constant that replaces the standard deviation; above 0.

    Returns:
        The batch with `advantages`.

    Raises:
        ConfigError: `f_norm` is not above 0.
    """
    if not f_norm > 0:
        raise ConfigError(f"f_norm is {f_norm!r}: expected a number above 0, such as 1.0")
    outcomes = _outcomes(batch)
    differs = outcomes.comparable & (outcomes.group_sum(outcomes.centred.abs()) > 0)
    alpha = outcomes.comparable.sum() / differs.sum().clamp(min=1)
    return with_advantages(outcomes.samples, torch.where(differs, alpha * outcomes.centred / f_norm, 0.0))
