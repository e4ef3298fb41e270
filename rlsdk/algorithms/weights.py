"""How the losses of tokens become one number: the `loss_weight` of every token, over a whole mini-batch.

The weights travel with the rows, so a loss is `sum(loss_weight * per-token loss)` however rows are cut into
micro-batches and ranks.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from rlsdk.algorithms.advantages import valid_rows
from rlsdk.interfaces import Batch, ConfigError, nearest


class Aggregation(StrEnum):
    """How tokens share the loss of a mini-batch. Rows that are not valid, and rows without a response, never count."""

    TOKEN_MEAN = "token_mean"
    """Every response token weighs the same: 1 / response tokens. DAPO (arXiv 2503.14476)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every row weighs the same: 1 / (rows * its response tokens). GRPO (arXiv 2402.03300)."""
    SEQUENCE_SUM = "sequence_sum"
    """Every response token weighs 1 / (rows * max_tokens), a constant: Dr. GRPO (arXiv 2503.20783)."""


def loss_weights(batch: Batch, aggregation: str = Aggregation.TOKEN_MEAN, *, max_tokens: int | None = None) -> Tensor:
    """Share of each token in the loss of the mini-batch `batch`.

    Args:
        batch: one whole mini-batch: what one optimizer step sees, over all ranks. Needs `response_mask`.
        aggregation: a value of `Aggregation`.
        max_tokens: the constant of `sequence_sum`: the most response tokens that a row may have.

    Returns:
        `[N]` float32, 0 off the mask; adds up to 1 for the two means (to 0 when nothing can be learnt from).

    Raises:
        ConfigError: an unknown aggregation, or `sequence_sum` without `max_tokens`.
    """
    counted = batch["response_mask"] & valid_rows(batch)[batch.row_of_token]
    row_tokens = batch.row_sum(counted.double())
    num_rows = (row_tokens > 0).sum()
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            per_row = 1 / row_tokens.sum().expand_as(row_tokens)
        case Aggregation.SEQUENCE_MEAN:
            per_row = 1 / (row_tokens * num_rows)
        case Aggregation.SEQUENCE_SUM:
            per_row = 1 / (num_rows * _constant(max_tokens)).expand_as(row_tokens).double()
        case _:
            valid = [a.value for a in Aggregation]
            raise ConfigError(
                f"loss aggregation {aggregation!r} does not exist{nearest(aggregation, valid)}; choose one of {valid}"
            )
    return torch.where(counted, per_row[batch.row_of_token], 0.0).float()


def _constant(max_tokens: int | None) -> int:
    if max_tokens is None or max_tokens < 1:
        raise ConfigError(
            f"loss aggregation 'sequence_sum' divides by max_tokens, which is {max_tokens!r}: "
            "give the most response tokens that a row may have"
        )
    return max_tokens
