"""Tokens with the same prefix, found once: under causal attention their hidden states and log-probs are the same.

The samples of a prompt share the prompt, all prompts of a chat share its system message, and a policy that is sure of
itself samples one response many times. What is computed once per distinct prefix gives every row the same numbers and
the same gradients as if each row had been computed alone. Peers share the prompt alone (PrefixGrouper, arXiv
2506.05433); here it is any prefix, whole rows included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch


@dataclass(frozen=True)
class Prefixes:
    """The distinct prefixes of a batch: a token stands for the prefix that ends in it."""

    first: Tensor
    """`[U]` int64, ascending: the first token of the batch that ends each prefix."""
    index: Tensor
    """`[N]` int64: which prefix each token ends."""

    @property
    def count(self) -> int:
        return len(self.first)


def distinct_prefixes(batch: Batch) -> Prefixes:
    """Finds them by a hash of each prefix, and proves that no two different ones met in a hash: exact or none shared.

    Args:
        batch: `input_ids`, on any device.
    """
    token, position = batch["input_ids"], batch.position_ids
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


_SALT = 0x5851F42D
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Of splitmix64's finalizer (Steele et al., 2014), as signed numbers."""


def _mixed(values: Tensor) -> Tensor:
    """A bijection of int64 that scatters bits; products wrap around."""
    values = (values ^ (values >> 30)) * _MULTIPLIERS[0]
    values = (values ^ (values >> 27)) * _MULTIPLIERS[1]
    return values ^ (values >> 31)


def _prefix_sums(values: Tensor, batch: Batch) -> Tensor:
    """`[N]`: of each token, the sum of its row's `values` up to and with it, modulo 2**64."""
    sums = values.cumsum(0)
    starts = torch.where(batch.lengths > 0, batch.offsets[:-1], 0)
    before = sums[starts] - values[starts]
    return sums - torch.repeat_interleave(before, batch.lengths)
