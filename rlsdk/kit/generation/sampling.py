"""Samples tokens: random numbers, filters and log-probs, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import SamplingParams

BRANCH = 32
"""Number of tokens, or groups of tokens, among which one random number decides."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters, one element per row."""

    temperature: Tensor
    """`[R]` float32; 1 for greedy rows."""
    greedy: Tensor
    """`[R]` bool."""
    top_k: Tensor
    """`[R]` int64; the largest integer if all tokens are kept."""
    top_p: Tensor
    """`[R]` float32."""
    min_p: Tensor
    """`[R]` float32."""
    stops: Tensor
    """`[R, S]` int64 token ids that end a row, padded with -1."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowSampling:
        width = max((len(p.stop_token_ids) for p in params), default=0)
        stops = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            greedy=column([p.temperature == 0 for p in params], torch.bool),
            top_k=column([p.top_k or torch.iinfo(torch.int64).max for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            stops=torch.tensor(stops, dtype=torch.int64, device=device).view(len(params), width),
        )

    def select(self, rows: Tensor) -> RowSampling:
        """The parameters of these rows, in this order."""
        fields = (self.temperature, self.greedy, self.top_k, self.top_p, self.min_p, self.stops)
        return RowSampling(*(field[rows] for field in fields))

    # Needed at every step; copied from a GPU only once.
    @cached_property
    def is_tempered(self) -> bool:
        return bool((self.temperature != 1).any())

    @cached_property
    def is_cut(self) -> bool:
        return bool(((self.top_k < torch.iinfo(torch.int64).max) | (self.top_p < 1)).any())

    @cached_property
    def has_floor(self) -> bool:
        return bool((self.min_p > 0).any())

    @cached_property
    def num_greedy(self) -> int:
        return int(self.greedy.sum())


def row_keys(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`[R]`: 64-bit keys from a request's seed and a sample's index; swapping the two gives another key."""
    return splitmix64(splitmix64(seeds) ^ indices.astype(np.uint64))


def mixed_seed(*parts: int) -> int:
    """64-bit seed that depends on every part and on their order."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = splitmix64(state ^ np.array([part % 2**64], np.uint64))
    return int(state[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64], vocabulary: int) -> Tensor:
    """`[R, L]` float32 in [0, 1): random numbers for each row's token at a position of its response.

    Counter-based, not a stream: they depend neither on other rows nor on earlier draws.
    """
    levels = num_levels(vocabulary)
    counters: NDArray[np.uint64] = positions.astype(np.uint64)[:, None] * np.uint64(64)
    counters = counters + np.arange(levels).astype(np.uint64)
    bits = splitmix64(keys[:, None] ^ splitmix64(counters))
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


def num_levels(vocabulary: int) -> int:
    """Number of decisions needed to choose among this many tokens."""
    levels, reach = 1, BRANCH
    while reach < vocabulary:
        levels, reach = levels + 1, reach * BRANCH
    return levels


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea & Flood 2014, modulo 2**64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token per row.

    Args:
        logits: `[R, V]`, any float dtype.
        sampling: of the rows.
        noise: `[R, L]` from `uniforms`.

    Returns:
        Tokens `[R]` int64 and their log-probs `[R]` float32, after temperature and before the filters. If logits are
        not finite, the log-prob is not either.
    """
    logits = logits.float()
    if sampling.is_tempered:
        logits = logits / sampling.temperature[:, None]
    log_probs = logits.log_softmax(-1)
    if sampling.num_greedy == len(logits):
        tokens = logits.argmax(-1)
    else:
        # Comparisons with NaN are false, which would lead beyond a vocabulary whose size is not a power of `BRANCH`.
        tokens = choose(filtered(log_probs.exp(), sampling), noise.to(logits.device)).clamp(max=logits.shape[1] - 1)
        if sampling.num_greedy:
            tokens = torch.where(sampling.greedy, logits.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def filtered(probs: Tensor, sampling: RowSampling) -> Tensor:
    """Sets probabilities that top-k, then top-p, then min-p exclude to 0; not renormalized.

    Among equal probabilities the lower token id comes first. The most probable token is always kept.

    Args:
        probs: `[R, V]` float32, rows sum to 1.
        sampling: of the rows.
    """
    if sampling.is_cut:
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        keep = torch.arange(probs.shape[1], device=probs.device) < sampling.top_k[:, None]
        kept = torch.where(keep, ordered, 0.0).double()
        before = kept.cumsum(-1) - kept
        top_p = sampling.top_p[:, None]
        # At 1 nothing may be excluded, which rounding of the sum could do.
        keep &= (before < top_p * kept.sum(-1, keepdim=True)) | (top_p >= 1)
        keep[:, 0] = True
        probs = torch.zeros_like(probs).scatter(1, index, torch.where(keep, ordered, 0.0))
    if sampling.has_floor:
        probs = torch.where(probs >= sampling.min_p[:, None] * probs.amax(-1, keepdim=True), probs, 0.0)
    return probs


def choose(weights: Tensor, noise: Tensor) -> Tensor:
    """`[R]` int64: an index per row, with probabilities proportional to its weights.

    Descends a tree of groups of `BRANCH`, with one random number per level. Inverting one cumulative sum over the whole
    vocabulary would be simpler, but there a change in the last bit of any weight shifts all later sums, and a number
    between two of thousands of sums is easily affected. Here few sums are near each number, so rounding differences
    between batches almost never change a token.

    Args:
        weights: `[R, V]` float32, not negative, at least one above 0 in each row.
        noise: `[R, L]` float32 in [0, 1), `L = num_levels(V)`.
    """
    levels = [weights]
    while levels[-1].shape[1] > BRANCH:
        levels[-1] = _in_groups(levels[-1])
        levels.append(levels[-1].sum(-1))
    sums = levels.pop().cumsum(-1)
    index = _below(sums, noise[:, :1])
    rows = torch.arange(len(weights), device=weights.device)
    for at, groups in enumerate(reversed(levels), start=1):
        index = index.clamp(max=groups.shape[1] - 1)  # beyond it only by comparisons with NaN
        index = index * BRANCH + _below(groups[rows, index].cumsum(-1), noise[:, at : at + 1])
    return index


def _in_groups(weights: Tensor) -> Tensor:
    """`[R, G, BRANCH]`, zeros after the last."""
    padded = F.pad(weights, (0, -weights.shape[1] % BRANCH))
    return padded.view(len(weights), -1, BRANCH)


def _below(sums: Tensor, noise: Tensor) -> Tensor:
    """`[R]`: the first index whose cumulative sum is above `noise` times the total; its weight is above 0."""
    total = sums[:, -1:]
    # The product may round up to the total, which no cumulative sum exceeds.
    target = torch.minimum(noise * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=sums.shape[1] - 1)
