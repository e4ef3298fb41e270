"""Estimators over time: a token gets credit for later rewards.

A time step goes from one response token to the next; tool tokens between them neither discount nor end a return. Nor
does the end of a row: the time of a sample goes through all of its rows, in their order. Where a sample has several
chains of rows (agents that act beside one another), each has a time of its own, and the sample's score at its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import CHAIN_SCORES, Samples, standardize, valid_rows
from rlsdk.algorithms.signal import score_dtype
from rlsdk.interfaces import Batch, BatchError, ConfigError, reads


def returns_to_go(batch: Batch, values: Tensor, discount: float) -> Tensor:
    """Returns `[N]` float64: `sum_k discount^k * values` over this and all later response tokens of the
    chain.

    It is 0 outside of the mask and on invalid samples. Computed by doubling: after pass j, each token has the
    discounted sum of 2^j tokens, so log2(longest chain) passes over flat tensors replace a loop over tokens.

    Args:
        batch: complete samples, with `response_mask`.
        values: `[N]`; ignored outside of the mask.
        discount: factor per response token, in [0, 1].
    """
    counted = batch["response_mask"] & valid_rows(batch)[batch.row_of_token]
    samples = Samples.of(batch)
    tokens = _in_time(samples, counted)
    chain, total = samples.chains.of_token[tokens], values[tokens].double()
    longest = int(samples.sum(batch.lengths).max()) if batch.num_rows else 0
    step = 1
    while step < min(longest, len(tokens)):
        later = torch.where(chain[:-step] == chain[step:], total[step:] * discount**step, 0.0)
        total = torch.cat([total[:-step] + later, total[-step:]])
        step *= 2
    return total.new_zeros(batch.num_tokens).index_put((tokens,), total)


def _in_time(samples: Samples, counted: Tensor) -> Tensor:
    """Returns the positions of the counted tokens, chain by chain, in the order in which they were sampled."""
    tokens = samples.batch.token_index(samples.chains.rows)
    return tokens[counted[tokens]]


def _next_value(batch: Batch, values: Tensor, counted: Tensor) -> Tensor:
    """Returns `[N]`: the value at the chain's next counted token; 0 at its last one."""
    samples = Samples.of(batch)
    tokens = _in_time(samples, counted)
    chain = samples.chains.of_token[tokens]
    following = torch.zeros_like(values[tokens])
    following[:-1] = torch.where(chain[:-1] == chain[1:], values[tokens][1:], 0.0)
    return torch.zeros_like(values).index_put((tokens,), following)


def rewards_of_chains(batch: Batch) -> Tensor:
    """Returns `[N]` float64: `token_level_rewards` with the sample's score on the last response token of each of its
    chains; there it is on that of the sample only. Scores of chains are on that of their chain there, too."""
    rewards: Tensor = batch["token_level_rewards"]
    if "chain" not in batch or CHAIN_SCORES in batch:
        return rewards
    samples = Samples.of(batch)
    tokens = _in_time(samples, batch["response_mask"])
    chain = samples.chains.of_token[tokens]
    ends = tokens[torch.cat([chain[:-1] != chain[1:], chain.new_ones(min(1, len(chain)), dtype=torch.bool)])]
    of_sample = samples.of_token[ends]
    order = torch.argsort(samples.rows)  # place of each row in the sample's time
    place = order[batch.row_of_token[ends]] * (batch.num_tokens + 1) + batch.position_ids[ends]
    last = place.new_full((samples.count,), -1).scatter_reduce(0, of_sample, place, "amax")
    earlier = ends[place != last[of_sample]]
    scores = samples.of_rows(batch["scores"]).to(score_dtype(batch)).double()
    usable = torch.where(samples.valid, scores, 0.0)
    return rewards.index_add(0, earlier, usable[samples.of_token[earlier]])


@reads("valid")
def reinforce(batch: Batch, *, gamma: float = 1.0) -> Batch:
    """Uses the return as advantage: `A_t = sum_k gamma^k r_(t+k)`, without a baseline.

    REINFORCE (Williams 1992).

    Args:
        batch: a whole step.
        gamma: discount per response token, in [0, 1].

    Returns:
        The batch with `advantages` and `returns`, which are equal.

    Raises:
        ConfigError: `gamma` is outside [0, 1].
    """
    returns = discounted_returns(batch, gamma).float()
    return batch.with_tokens(advantages=returns, returns=returns)


def discounted_returns(batch: Batch, gamma: float) -> Tensor:
    """Returns `[N]`: the return of each response token, in float32 if that holds every reward, else in float64.

    Raises:
        ConfigError: `gamma` is outside [0, 1].
    """
    _check_share("gamma", gamma)
    rewards = rewards_of_chains(batch)
    counted = rewards[batch["response_mask"] & valid_rows(batch)[batch.row_of_token]]
    narrow = torch.equal(counted.float().double(), counted.double())
    returns = returns_to_go(batch, rewards, gamma)
    return returns.float() if narrow else returns


@reads("valid", "baseline_scores")
def remax(batch: Batch) -> Batch:
    """Computes the return to go minus the score of a greedy response to the same prompt.

    ReMax (Li et al. 2023, arXiv 2310.10505), algorithm 1. As in verl, the baseline is the greedy response's score
    without the KL penalty.

    Args:
        batch: a whole step, with `baseline_scores [B]` float32: the score of the greedy response, NaN if its reward
            failed. Such samples get 0.

    Returns:
        The batch with `advantages` and `returns` (before the baseline).

    Raises:
        BatchError: chains have scores of their own, which the baseline of a whole sample is not comparable with.
    """
    if CHAIN_SCORES in batch:
        raise BatchError(
            "remax: chains have scores of their own (Episode.chain_rewards), and the greedy baseline is the score of a "
            "whole sample; use an estimator by groups, such as grpo, or reinforce"
        )
    returns = returns_to_go(batch, rewards_of_chains(batch), 1.0)
    baseline = batch["baseline_scores"].double()
    usable = valid_rows(batch) & baseline.isfinite()
    counted = batch["response_mask"] & usable[batch.row_of_token]
    advantages = torch.where(counted, returns - baseline[batch.row_of_token], 0.0)
    return batch.with_tokens(advantages=advantages.float(), returns=returns.float())


@reads("valid", "values")
def gae(
    batch: Batch, *, gamma: float = 1.0, lam: float = 1.0, critic_lam: float | None = None, normalize: bool = True
) -> Batch:
    """Generalized advantage estimation: `A_t = sum_k (gamma lam)^k d_(t+k)`, `d_t = r_t + gamma V_(t+1) - V_t`.

    Schulman et al. 2015 (arXiv 1506.02438), equation 16. The value after the last response token is 0, also for
    truncated responses. Gaps of the mask are skipped: V_(t+1) is the value at the next response token. It may be in the
    chain's next row: a history that was rewritten is a transition like any other.

    Args:
        batch: a whole step, with `values [N]` of the critic before this update.
        gamma: discount per response token, in [0, 1].
        lam: in [0, 1]; 1 gives the return minus the value, 0 the one-step error.
        critic_lam: a different lambda for `returns` (VC-PPO, Yuan et al. 2025, arXiv 2503.01491: 1.0 with long
            responses). None: `lam`.
        normalize: normalise `advantages` to mean 0 and variance 1 over the step's response tokens; `returns` are
            computed before.

    Returns:
        The batch with `advantages` and `returns` (advantage plus value: the critic's target).

    Raises:
        ConfigError: a number is outside [0, 1].
    """
    _check_share("gamma", gamma)
    _check_share("lam", lam)
    counted = batch["response_mask"] & valid_rows(batch)[batch.row_of_token]
    values = torch.where(counted, batch["values"], 0.0).double()
    rewards = torch.where(counted, rewards_of_chains(batch), 0.0).double()
    errors = rewards + gamma * _next_value(batch, values, counted) - values
    advantages = returns_to_go(batch, errors, gamma * lam)
    critic = advantages
    if critic_lam is not None and critic_lam != lam:
        _check_share("critic_lam", critic_lam)
        critic = returns_to_go(batch, errors, gamma * critic_lam)
    returns = torch.where(counted, critic + values, 0.0)
    if normalize:
        advantages = standardize(advantages, counted)
    return batch.with_tokens(advantages=advantages.float(), returns=returns.float())


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}: expected a number in [0, 1], such as 1.0")
