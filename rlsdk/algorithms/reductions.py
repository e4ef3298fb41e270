"""Sums over rows, groups and masks of the packed batch: what estimators, corrections and metrics are written with."""

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


def trained_rows(batch: Batch) -> Tensor:
    """`[B]` bool: valid rows that carry loss, by the field `trained` where the batch has it."""
    return valid_rows(batch) & batch["trained"] if "trained" in batch else valid_rows(batch)


def response_lengths(batch: Batch) -> Tensor:
    """`[B]` int64: tokens of each row that the policy sampled; tool tokens between them do not count."""
    return batch.row_sum(batch["response_mask"].long())


def outcome_rewards(batch: Batch) -> Tensor:
    """`[B]` float64: sum of each row's `token_level_rewards` over its response; 0 on rows that are not valid."""
    rewards = torch.where(batch["response_mask"], batch["token_level_rewards"], 0.0)
    return torch.where(valid_rows(batch), batch.row_sum(rewards.double()), 0.0)


def with_advantages(batch: Batch, per_row: Tensor) -> Batch:
    """Adds `advantages`, flat `[N]` float32: a number per row `[B]` on each response token of that row."""
    spread = per_row.float()[batch.row_of_token]
    return batch.with_tokens(advantages=torch.where(batch["response_mask"], spread, 0.0))


def row_mean(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """`[B]`: mean of a flat `[N]` tensor over each row's tokens under `mask`; 0 where there are none.
    Differentiable."""
    count = batch.row_sum(mask.to(values.dtype)).clamp(min=1)
    return batch.row_sum(torch.where(mask, values, 0.0)) / count


def standardize(values: Tensor, where: Tensor, *, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(variance + eps)` over `where`, 0 elsewhere; float64 inside, the dtype of `values` outside.

    The variance has the divisor n - 1. Fewer than two values, or equal ones, give 0.
    """
    chosen = values[where].double()
    out = values.new_zeros(values.shape)
    if len(chosen) > 1:
        out[where] = ((chosen - chosen.mean()) * (chosen.var() + eps).rsqrt()).to(values.dtype)
    return out


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Rows of equal `uid` (any int64), and sums over them."""

    index: Tensor
    """`[B]` int64: each row's group, 0..count-1."""
    count: int

    @classmethod
    def of(cls, batch: Batch) -> Groups:
        """By the field `uid`."""
        uids, index = torch.unique(batch["uid"], return_inverse=True)
        return cls(index=index, count=len(uids))

    def sum(self, values: Tensor) -> Tensor:
        """`[groups]`: sum of a number per row, in its dtype; differentiable."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def largest(self, values: Tensor) -> Tensor:
        """`[groups]`: largest number per row of each group."""
        start = values.new_full((self.count,), -torch.inf)
        return start.scatter_reduce(0, self.index, values, "amax")

    def smallest(self, values: Tensor) -> Tensor:
        """`[groups]`: smallest number per row of each group."""
        return -self.largest(-values)
