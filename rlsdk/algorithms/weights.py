"""Loss aggregation: the `loss_weight` of every token, computed over a whole mini-batch.

The weights are a field of the batch, so the loss is `sum(loss_weight * per-token loss)` for every split of the rows
into micro-batches and ranks. An aggregation computes the weights; for every aggregation, `loss_weights` sets them to 0
on rows without loss and outside of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, Samples, trained_rows
from rlsdk.interfaces import Batch, ConfigError, LossAggregation, nearest


class Aggregation(StrEnum):
    """Names of the built-in aggregations. A sequence is a sample, with all its rows. Rows without loss, and samples
    without a token that has loss, never count. Where rows have a factor (`row_scale`), a token counts that much."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_SUM = "sequence_sum"
    SEQUENCE_TOKEN_SUM = "sequence_token_sum"
    TOKEN_SUM_NORM = "token_sum_norm"
    PROMPT_MEAN = "prompt_mean"
    ROW_MEAN = "row_mean"


def token_mean(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Gives every token the same weight: 1 / tokens. DAPO (arXiv 2503.14476), equation 8; verl's `token-mean`."""
    return (1 / _scaled(batch, counted).sum()).expand(batch.num_tokens)


def sequence_mean(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Gives every sample the same weight: 1 / (samples * tokens of the sample). GRPO (arXiv 2402.03300), equation 3;
    verl's `seq-mean-token-mean`."""
    samples = Samples.of(batch)
    tokens = samples.token_sum(_scaled(batch, counted))
    return (1 / (tokens * _count(samples, counted)))[samples.of_token]


def sequence_sum(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Gives every token the constant weight 1 / (samples * max_tokens). Dr. GRPO (arXiv 2503.20783), as in the authors'
    code and TRL."""
    constant = _constant("sequence_sum", max_tokens)
    return (1 / (_count(Samples.of(batch), counted) * constant)).expand(batch.num_tokens)


def sequence_token_sum(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Sums over a sample's tokens, and averages over samples: 1 / samples. The plain policy gradient; verl's
    `seq-mean-token-sum`. The scale grows with the length of responses: lower the learning rate, or clip the gradient.
    """
    return (1 / _count(Samples.of(batch), counted)).expand(batch.num_tokens)


def token_sum_norm(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Gives every token the weight 1 / max_tokens, so it also sums over samples. verl's `seq-mean-token-sum-norm`,
    whose scale grows with the number of samples; `sequence_sum` also divides by it."""
    return counted.new_full((), 1 / _constant("token_sum_norm", max_tokens), dtype=torch.float64).expand(len(counted))


def prompt_mean(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Gives every prompt the same weight, and every token within a prompt: 1 / (prompts * tokens of the prompt's rows).
    ScaleRL (Khatri et al. 2025, arXiv 2510.13786). A prompt with rows in two mini-batches counts in both."""
    groups = Groups.of(batch)
    tokens = groups.sum(batch.row_sum(_scaled(batch, counted)))
    return (1 / (tokens * (tokens > 0).sum()))[groups.index][batch.row_of_token]


def row_mean(batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
    """Gives every row the same weight, however many rows its sample has: 1 / (rows * tokens of the row). What the
    other means do not depend on, this one does: where a sample is cut into rows."""
    tokens = batch.row_sum(counted.double())
    return (1 / (tokens * (tokens > 0).sum()))[batch.row_of_token]


AGGREGATIONS: Mapping[str, LossAggregation] = {
    Aggregation.TOKEN_MEAN: token_mean,
    Aggregation.SEQUENCE_MEAN: sequence_mean,
    Aggregation.SEQUENCE_SUM: sequence_sum,
    Aggregation.SEQUENCE_TOKEN_SUM: sequence_token_sum,
    Aggregation.TOKEN_SUM_NORM: token_sum_norm,
    Aggregation.PROMPT_MEAN: prompt_mean,
    Aggregation.ROW_MEAN: row_mean,
}
"""Built-in aggregations by name."""


def loss_weights(
    batch: Batch, aggregation: str | LossAggregation = Aggregation.TOKEN_MEAN, *, max_tokens: int | None = None
) -> Tensor:
    """Computes the weight of each token in the loss of a mini-batch.

    Args:
        batch: one whole mini-batch: all rows of one optimizer step, over all ranks. Needs `response_mask`; if the batch
            has the fields `valid` and `trained` (see `SCHEMA`), rows where one is False have no loss; the weights of a
            row with a `row_scale` are multiplied by it.
        aggregation: a value of `Aggregation`, or a function.
        max_tokens: the constant of `sequence_sum` and `token_sum_norm`: the maximum number of response tokens of a
            sample.

    Returns:
        `[N]` float32, 0 outside of the mask. The weights of a mean add up to 1, or to 0 if no row has loss.

    Raises:
        ConfigError: the aggregation is unknown, or needs `max_tokens`.
    """
    counted = batch["response_mask"] & trained_rows(batch)[batch.row_of_token]
    share = _aggregation(aggregation)(batch, counted, max_tokens)
    if "row_scale" in batch:
        share = share * batch["row_scale"][batch.row_of_token]
    return torch.where(counted, share, 0.0).float()


def keep_top_entropy(batch: Batch, share: float) -> Batch:
    """Keeps loss only on the tokens with the highest entropy; sets `loss_weight` to 0 on the others.

    Wang et al. 2025, "Beyond the 80/20 rule" (arXiv 2506.01939). The threshold is a quantile over all tokens of the
    mini-batch. Kept tokens keep their weight, so the loss is still divided by the number of all tokens. All tokens at
    the threshold are kept. The entropy is that of the policy before the update, a field of the batch, so the choice
    does not depend on micro-batches and ranks (other implementations compute it per micro-batch).

    Args:
        batch: one whole mini-batch with `loss_weight` and `entropy [N]`.
        share: share of the tokens with loss to keep, in (0, 1]; 0.2 in the paper.

    Returns:
        The batch with the new `loss_weight`.

    Raises:
        ConfigError: `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(f"top-entropy share is {share!r}: expected a number above 0 and at most 1, such as 0.2")
    weight = batch["loss_weight"]
    counted = batch["response_mask"] & (weight != 0)
    entropy = batch["entropy"][counted]
    if not len(entropy):
        return batch
    kept = max(1, round(share * len(entropy)))
    threshold = entropy.kthvalue(len(entropy) - kept + 1).values
    return batch.with_tokens(loss_weight=torch.where(counted & (batch["entropy"] >= threshold), weight, 0.0))


def _scaled(batch: Batch, counted: Tensor) -> Tensor:
    """Returns `[N]` float64: how much each token counts in a normaliser: 1, or its row's factor."""
    one = counted.double()
    return one * batch["row_scale"][batch.row_of_token] if "row_scale" in batch else one


def _count(samples: Samples, counted: Tensor) -> Tensor:
    """Returns the number of samples with loss, float64."""
    return (samples.token_sum(counted.long()) > 0).sum().double()


def _aggregation(name: str | LossAggregation) -> LossAggregation:
    if not isinstance(name, str):
        return name
    if name not in AGGREGATIONS:
        valid = list(map(str, AGGREGATIONS))
        raise ConfigError(f"loss aggregation {name!r} does not exist{nearest(name, valid)}; choose one of {valid}")
    return AGGREGATIONS[name]


def _constant(name: str, max_tokens: int | None) -> int:
    if max_tokens is None or max_tokens < 1:
        raise ConfigError(
            f"loss aggregation {name!r} divides by max_tokens, which is {max_tokens!r}: "
            "give the maximum number of response tokens of a sample"
        )
    return max_tokens
