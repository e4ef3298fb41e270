"""Scores of steps: read from the values of a process reward model, and reduced to one score per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Samples
from rlsdk.interfaces import Batch, BatchError

REDUCTIONS = ("min", "mean", "product", "last")
"""How the scores of a sample's steps become one score."""


def step_scores(batch: Batch, ends: Tensor, values: Tensor) -> Tensor:
    """Returns `[N]` float64: probability that the step which ends at a token is right; 0 on all other tokens.

    It is the sigmoid of the value of the token after it, which is computed from the hidden state of the step's last
    token.

    Args:
        batch: the rows.
        ends: `[N]` bool: last tokens of steps.
        values: `[N]`, of a process reward model.

    Raises:
        BatchError: a step ends at the last token of its row, which no token follows.
    """
    places = ends.nonzero()[:, 0]
    lasts = torch.isin(places, batch.offsets[1:] - 1)
    if lasts.any():
        row = int(batch.row_of_token[places[lasts][0]])
        raise BatchError(f"row_id {int(batch['row_id'][row])}: a step ends at its last token, and no token follows it")
    scores = values.new_zeros(batch.num_tokens, dtype=torch.float64)
    return scores.index_put((places,), values[places + 1].double().sigmoid())


def reduce_steps(samples: Samples, ends: Tensor, scores: Tensor, how: str) -> Tensor:
    """Returns `[S]` float64: one score per sample, of the scores of its steps; 0 for a sample without a step.

    Args:
        samples: of the batch.
        ends: `[N]` bool: last tokens of steps.
        scores: `[N]`, of `step_scores`.
        how: of `REDUCTIONS`. Wang et al. 2024 (arXiv 2312.08935) take the minimum, Lightman et al. 2023
            (arXiv 2305.20050) the product.
    """
    tokens = samples.tokens[ends[samples.tokens]]  # sample by sample, in the order in which they were written
    owner, of_step = samples.of_token[tokens], scores[tokens]
    count = torch.zeros(samples.count, dtype=torch.float64).index_add(0, owner, torch.ones_like(of_step))
    none = count == 0
    if how == "mean":
        return torch.zeros_like(count).index_add(0, owner, of_step) / count.clamp(min=1)
    if how == "last":
        place = torch.arange(len(tokens), device=owner.device)
        last = torch.zeros_like(none, dtype=torch.long).scatter_reduce(0, owner, place, "amax")
        return torch.where(none, 0.0, of_step[last] if len(of_step) else count)
    reduced = torch.ones_like(count).scatter_reduce(0, owner, of_step, {"min": "amin", "product": "prod"}[how])
    return torch.where(none, 0.0, reduced)
