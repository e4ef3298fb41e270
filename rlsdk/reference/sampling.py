"""Drawing tokens: filters, seeds and log-probs, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class RowSampling:
    """Sampling parameters of the running rows, one element each."""

    temperature: Tensor
    """`[R]` float32; 1 where the row is greedy."""
    greedy: Tensor
    """`[R]` bool."""
    top_k: Tensor
    """`[R]` int64; the vocabulary's size where all are kept."""
    top_p: Tensor
    min_p: Tensor
    stops: Tensor
    """`[R, S]` int64 token ids that end a row, -1 where there are fewer."""
    key: NDArray[np.uint64]
    """`[R]`: what the row's noise is drawn from."""

    @classmethod
    def of(cls, rows: Sequence[tuple[SamplingParams, int, int]], vocabulary: int, device: torch.device) -> RowSampling:
        """Args: rows: parameters, seed and sample index of each row."""
        params = [p for p, _, _ in rows]
        width = max((len(p.stop_token_ids) for p in params), default=0)
        stops = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params]

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            greedy=column([p.temperature == 0 for p in params], torch.bool),
            top_k=column([p.top_k or vocabulary for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            stops=torch.tensor(stops, dtype=torch.int64, device=device).view(len(rows), width),
            key=row_keys([seed for _, seed, _ in rows], [index for _, _, index in rows]),
        )

    def select(self, rows: Tensor) -> RowSampling:
        fields = ("temperature", "greedy", "top_k", "top_p", "min_p", "stops")
        return RowSampling(**{name: getattr(self, name)[rows] for name in fields}, key=self.key[rows.cpu().numpy()])

    def join(self, other: RowSampling) -> RowSampling:
        width = max(self.stops.shape[1], other.stops.shape[1])
        stops = [
            torch.nn.functional.pad(part.stops, (0, width - part.stops.shape[1]), value=-1) for part in (self, other)
        ]
        fields = ("temperature", "greedy", "top_k", "top_p", "min_p")
        joined = {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in fields}
        return RowSampling(**joined, stops=torch.cat(stops), key=np.concatenate([self.key, other.key]))


def row_keys(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.uint64]:
    """64 bits that depend on a request's seed and the sample's index."""
    mixed = splitmix64(np.array([seed % 2**64 for seed in seeds], np.uint64))
    return splitmix64(mixed ^ splitmix64(np.array(indices, np.uint64)))


def uniforms(key: NDArray[np.uint64], position: int | NDArray[np.int64]) -> Tensor:
    """`[R]` float64 in [0, 1): the noise of each row's token at a position of its response.

    A counter, not a stream: what a row draws does not depend on the rows around it.
    """
    counter = np.asarray(position, np.uint64) * _GOLDEN
    bits = splitmix64(key ^ splitmix64(counter + np.zeros_like(key)))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea & Flood 2014, modulo 2**64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token a row.

    Args:
        logits: `[R, V]`, any float dtype.
        sampling: of the rows.
        noise: `[R]` float64 in [0, 1).

    Returns:
        Tokens `[R]` int64 and their log-probs `[R]` float32, after temperature and before the filters.
    """
    logits = logits.float()
    if bool((sampling.temperature != 1).any()):
        logits = logits / sampling.temperature[:, None]
    log_probs = logits.log_softmax(-1)
    probs = filtered(log_probs.exp(), sampling).double()
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, behind which there is no token.
    target = torch.minimum(noise.to(total.device)[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    if bool(sampling.greedy.any()):
        tokens = torch.where(sampling.greedy, log_probs.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def filtered(probs: Tensor, sampling: RowSampling) -> Tensor:
    """Zeroes what top-k, then top-p, then min-p leave out; not normalised again. At least the likeliest stays.

    Args:
        probs: `[R, V]` float32, rows sum to 1.
    """
    vocabulary = probs.shape[1]
    if bool((sampling.top_k < vocabulary).any()) or bool((sampling.top_p < 1).any()):
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocabulary, device=probs.device)
        kept = torch.where(rank < sampling.top_k[:, None], ordered, 0.0)
        before = kept.cumsum(-1) - kept
        kept = torch.where(before < sampling.top_p[:, None] * kept.sum(-1, keepdim=True), kept, 0.0)
        kept[:, 0] = ordered[:, 0]
        probs = torch.zeros_like(probs).scatter(1, index, kept)
    if bool((sampling.min_p > 0).any()):
        floor = sampling.min_p[:, None] * probs.amax(-1, keepdim=True)
        probs = torch.where(probs >= floor, probs, 0.0)
    return probs
