"""Reductions over rows, groups and masks of the packed batch, for estimators, corrections and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch


def valid_rows(batch: Batch) -> Tensor:
    """Returns `[B]` bool: rows whose reward can be used; all rows if the batch has no field `valid`."""
    if "valid" in batch:
        return batch["valid"]
    return torch.ones(batch.num_rows, dtype=torch.bool, device=batch.lengths.device)


def trained_rows(batch: Batch) -> Tensor:
    """Returns `[B]` bool: valid rows that contribute to the loss, by the field `trained` if the batch has it."""
    return valid_rows(batch) & batch["trained"] if "trained" in batch else valid_rows(batch)


def response_lengths(batch: Batch) -> Tensor:
    """Returns `[B]` int64: number of tokens of each row that the policy sampled; tool tokens do not count."""
    return batch.row_sum(batch["response_mask"].long())


def total_scores(batch: Batch, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[B]` float64: `scores` plus the row's `token_scores`, if the batch has them, each rounded to `dtype`."""
    scores: Tensor = batch["scores"].to(dtype).double()
    if "token_scores" in batch:
        scores = scores + batch.row_sum(batch["token_scores"].to(dtype).double())
    return scores


def outcome_rewards(batch: Batch) -> Tensor:
    """Returns `[B]` float64: sum of each row's `token_level_rewards` over its response; 0 on invalid rows."""
    rewards = torch.where(batch["response_mask"], batch["token_level_rewards"], 0.0)
    return torch.where(valid_rows(batch), batch.row_sum(rewards.double()), 0.0)


def with_advantages(batch: Batch, per_row: Tensor) -> Batch:
    """Adds `advantages`, flat `[N]` float32: the value of each row (`per_row`, `[B]`) on all its response tokens."""
    spread = per_row.float()[batch.row_of_token]
    return batch.with_tokens(advantages=torch.where(batch["response_mask"], spread, 0.0))


def row_mean(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """Returns `[B]`: mean of a flat `[N]` tensor over each row's tokens under `mask`; 0 if a row has none.

    Differentiable.
    """
    count = batch.row_sum(mask.to(values.dtype)).clamp(min=1)
    return batch.row_sum(torch.where(mask, values, 0.0)) / count


def standardize(values: Tensor, where: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns `(x - mean) / sqrt(variance + eps)` over `where`, 0 elsewhere.

    Computed in float64, returned in the dtype of `values`. The variance has the divisor n - 1. Fewer than two values,
    or equal ones, give 0.
    """
    chosen = values[where].double()
    out = values.new_zeros(values.shape)
    if len(chosen) > 1:
        out[where] = ((chosen - chosen.mean()) * (chosen.var() + eps).rsqrt()).to(values.dtype)
    return out


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of rows with equal `uid` (any int64), and reductions over them."""

    index: Tensor
    """`[B]` int64: group of each row, 0..count-1."""
    count: int

    @classmethod
    def of(cls, batch: Batch) -> Groups:
        """Groups the rows of a batch by the field `uid`."""
        uids, index = torch.unique(batch["uid"], return_inverse=True)
        return cls(index=index, count=len(uids))

    def sum(self, values: Tensor) -> Tensor:
        """Returns `[groups]`: sum of `values` (`[B]`) over each group, in their dtype; differentiable."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def largest(self, values: Tensor) -> Tensor:
        """Returns `[groups]`: maximum of `values` (`[B]`) in each group."""
        start = values.new_full((self.count,), -torch.inf)
        return start.scatter_reduce(0, self.index, values, "amax")

    def smallest(self, values: Tensor) -> Tensor:
        """Returns `[groups]`: minimum of `values` (`[B]`) in each group."""
        return -self.largest(-values)
