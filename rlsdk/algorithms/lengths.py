"""What a response's length does to its score, and what becomes of one that was cut. Lengths are response tokens: those
that the policy sampled, tool tokens not among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, response_lengths, valid_rows
from rlsdk.interfaces import Batch, ConfigError


def overlong_punishment(batch: Batch, *, max_tokens: int, cache_tokens: int, factor: float = 1.0) -> Batch:
    """Adds to `scores` the soft punishment of long responses: 0 up to `max_tokens - cache_tokens`, then linear down to
    `-factor` at `max_tokens`, and `-factor` beyond.

    DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13.

    Args:
        batch: with `scores` and `response_mask`.
        max_tokens: most tokens of a response.
        cache_tokens: width of the slope, from 1 to `max_tokens`.
        factor: the largest punishment, in units of reward; the paper's is 1.

    Raises:
        ConfigError: `cache_tokens` outside its range, or a negative factor.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ConfigError(f"cache_tokens is {cache_tokens!r}: expected from 1 to max_tokens, which is {max_tokens!r}")
    if factor < 0:
        raise ConfigError(f"factor is {factor!r}: expected a punishment of at least 0, such as 1.0")
    excess = response_lengths(batch) - (max_tokens - cache_tokens)
    return _add_to_scores(batch, -factor * (excess / cache_tokens).clamp(0.0, 1.0))


def length_penalty(batch: Batch, *, coef: float, free_tokens: int = 0, max_penalty: float | None = None) -> Batch:
    """Adds to `scores` a linear penalty: `-coef` for each response token beyond `free_tokens`.

    Args:
        batch: with `scores` and `response_mask`.
        coef: units of reward per token, at least 0.
        free_tokens: tokens that cost nothing.
        max_penalty: the most that is taken off; None: no bound.

    Raises:
        ConfigError: a negative number.
    """
    for name, value in (("coef", coef), ("free_tokens", free_tokens), ("max_penalty", max_penalty or 0)):
        if value < 0:
            raise ConfigError(f"{name} is {value!r}: expected a number of at least 0")
    penalty = coef * (response_lengths(batch) - free_tokens).clamp(min=0).float()
    return _add_to_scores(batch, -penalty if max_penalty is None else -penalty.clamp(max=max_penalty))


def relative_length_reward(batch: Batch, *, coef: float = 1.0, right_from: float = 1.0) -> Batch:
    """Adds to `scores` a reward for being shorter than the group: `l = 0.5 - (length - shortest) / (longest -
    shortest)`, for right answers; `min(0, l)` for wrong ones, so that a short wrong answer gains nothing.

    Kimi k1.5 (Kimi team 2025, arXiv 2501.12599), section 2.3.3. Shortest and longest are over the group's valid rows;
    where all are of one length nothing is added.

    Args:
        batch: a whole step with `scores`, `uid`, `response_mask`.
        coef: weight of the term; the paper warms it up.
        right_from: score from which an answer is right.
    """
    groups, valid = Groups.of(batch), valid_rows(batch)
    length = response_lengths(batch).double()
    longest = groups.largest(torch.where(valid, length, -torch.inf))[groups.index]
    shortest = groups.smallest(torch.where(valid, length, torch.inf))[groups.index]
    spread = longest - shortest
    relative = torch.where(valid & (spread > 0), 0.5 - (length - shortest) / spread, 0.0)
    is_right = batch["scores"] >= right_from
    return _add_to_scores(batch, coef * torch.where(is_right, relative, relative.clamp(max=0)).float())


def overlong_filter(batch: Batch) -> Batch:
    """Takes truncated rows out of the loss: their score counts for the group, their tokens carry no loss and are not
    counted by any aggregation (`trained` is False on them).

    DAPO (arXiv 2503.14476), section 3.4, "overlong filtering".

    Args:
        batch: with `truncated`.
    """
    kept = ~batch["truncated"]
    return batch.with_rows(trained=kept & batch["trained"] if "trained" in batch else kept)


def _add_to_scores(batch: Batch, change: Tensor) -> Batch:
    return batch.with_rows(scores=batch["scores"] + change.to(batch["scores"].dtype))
