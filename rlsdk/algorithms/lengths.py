"""Length penalties on scores, and the filter for truncated responses.

Lengths are numbers of response tokens of a sample: those that the policy sampled, in all its rows, without tool tokens.
"""

from __future__ import annotations

import torch

from rlsdk.algorithms.reductions import Samples
from rlsdk.algorithms.signal import scores_differ
from rlsdk.interfaces import Batch, ConfigError


def overlong_punishment(batch: Batch, *, max_tokens: int, cache_tokens: int, factor: float = 1.0) -> Batch:
    """Adds a soft penalty for long responses to `scores`.

    It is 0 up to `max_tokens - cache_tokens`, falls linearly to `-factor` at `max_tokens`, and is `-factor` beyond.
    DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13.

    Args:
        batch: with `scores` and `response_mask`.
        max_tokens: length from which the penalty is maximal.
        cache_tokens: number of tokens over which the penalty grows, from 1 to `max_tokens`.
        factor: maximum penalty, in units of reward; 1 in the paper.

    Raises:
        ConfigError: `cache_tokens` is outside its range, or `factor` is negative.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ConfigError(f"cache_tokens is {cache_tokens!r}: expected from 1 to max_tokens, which is {max_tokens!r}")
    if factor < 0:
        raise ConfigError(f"factor is {factor!r}: expected a penalty of at least 0, such as 1.0")
    samples = Samples.of(batch)
    excess = samples.lengths.double() - (max_tokens - cache_tokens)
    return samples.add_to_scores(-factor * (excess / cache_tokens).clamp(0.0, 1.0))


def length_penalty(batch: Batch, *, coef: float, free_tokens: int = 0, max_penalty: float | None = None) -> Batch:
    """Adds a linear penalty to `scores`: `-coef` for each response token beyond `free_tokens`.

    Args:
        batch: with `scores` and `response_mask`.
        coef: units of reward per token, at least 0.
        free_tokens: number of tokens without penalty.
        max_penalty: maximum penalty; None: no limit.

    Raises:
        ConfigError: a number is negative.
    """
    for name, value in (("coef", coef), ("free_tokens", free_tokens), ("max_penalty", max_penalty or 0)):
        if value < 0:
            raise ConfigError(f"{name} is {value!r}: expected a number of at least 0")
    samples = Samples.of(batch)
    penalty = coef * (samples.lengths - free_tokens).clamp(min=0).double()
    return samples.add_to_scores(-penalty if max_penalty is None else -penalty.clamp(max=max_penalty))


def relative_length_reward(batch: Batch, *, coef: float = 1.0, right_from: float = 1.0) -> Batch:
    """Adds a reward to `scores` for responses that are shorter than others of their group.

    It is `l = 0.5 - (length - shortest) / (longest - shortest)` for correct answers, and `min(0, l)` for wrong ones, so
    that a short wrong answer gains nothing. Kimi k1.5 (Kimi team 2025, arXiv 2501.12599), section 2.3.3. `shortest` and
    `longest` are over the valid samples of the group; if all have the same length, the term is 0.

    Args:
        batch: a whole step with `scores`, `uid`, `response_mask`.
        coef: weight of the term; the paper warms it up.
        right_from: minimum score of a correct answer.
    """
    samples = Samples.of(batch)
    groups, valid, length = samples.groups, samples.valid, samples.lengths.double()
    longest = groups.largest(torch.where(valid, length, -torch.inf))[groups.index]
    shortest = groups.smallest(torch.where(valid, length, torch.inf))[groups.index]
    spread = longest - shortest
    relative = torch.where(valid & (spread > 0), 0.5 - (length - shortest) / spread, 0.0)
    scores = samples.of_rows(batch["scores"]).double()
    is_right = ~scores_differ(torch.full_like(scores, right_from), scores)
    return samples.add_to_scores(coef * torch.where(is_right, relative, relative.clamp(max=0)))


def overlong_filter(batch: Batch) -> Batch:
    """Removes truncated samples from the loss, by setting `trained` to False.

    Their score still counts for the group; their tokens have no loss, and no aggregation counts them. DAPO (arXiv
    2503.14476), section 3.4, "overlong filtering".

    Args:
        batch: with `truncated`.
    """
    kept = ~batch["truncated"]
    return batch.with_rows(trained=kept & batch["trained"] if "trained" in batch else kept)
