"""Finds tokens with the same prefix: under causal attention their hidden states and log-probs are the same.

Samples of a prompt share the prompt, prompts of a chat share its system message, and a confident policy samples a
response many times. Computing once per distinct prefix gives every row the same numbers and gradients as computing each
row alone. Related work shares only the prompt (PrefixGrouper, arXiv 2506.05433); here it is any prefix, including whole
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch


@dataclass(frozen=True)
class Prefixes:
    """The distinct prefixes of a batch; each token is identified with the prefix that it ends."""

    first: Tensor
    """`[U]` int64, ascending: the first token of the batch that ends each prefix."""
    index: Tensor
    """`[N]` int64: the prefix that each token ends."""

    @property
    def count(self) -> int:
        return len(self.first)


def distinct_prefixes(batch: Batch) -> Prefixes:
    """Finds distinct prefixes by hash, and verifies that no two different ones collide: if they do, none is shared.

    Args:
        batch: `input_ids`, on any device. Rows of different teachers (`teacher_index`) share none.
    """
    token, position = batch["input_ids"], batch.position_ids
    if (teacher := batch.tokens.get("teacher_index")) is not None:
        token = token + (teacher + 1) * _IDS
    codes = _mixed(_prefix_sums(_mixed(token) * _mixed(position + _SALT), batch) + position)
    _, index = torch.unique(codes, return_inverse=True)
    place = torch.arange(len(token), device=token.device)
    first = place.new_full((int(index.max()) + 1,), len(token)).scatter_reduce(0, index, place, "amin")
    first, order = first.sort()
    index = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))[index]
    twin = first[index]
    # By induction along the row: same token, same position, and the token before ends the same prefix.
    before = torch.where(position > 0, index[place - 1], -1)
    same = (token == token[twin]) & (position == position[twin]) & (before == before[twin])
    return Prefixes(first, index) if bool(same.all()) else Prefixes(place, place)


_IDS = 1 << 40
"""Above every token id."""
_SALT = 0x5851F42D
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Multipliers of splitmix64's finalizer (Steele et al., 2014), as signed numbers."""


def _mixed(values: Tensor) -> Tensor:
    """A bijection of int64 that mixes bits; products wrap around."""
    values = (values ^ (values >> 30)) * _MULTIPLIERS[0]
    values = (values ^ (values >> 27)) * _MULTIPLIERS[1]
    return values ^ (values >> 31)


def _prefix_sums(values: Tensor, batch: Batch) -> Tensor:
    """`[N]`: for each token, the sum of its row's `values` up to and including it, modulo 2**64."""
    sums = values.cumsum(0)
    starts = torch.where(batch.lengths > 0, batch.offsets[:-1], 0)
    before = sums[starts] - values[starts]
    return sums - torch.repeat_interleave(before, batch.lengths)
