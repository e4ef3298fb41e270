"""Rollout engines that draw other tokens than they should: distribution, noise and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from broken.rollout import Rewritten
from rlsdk.interfaces import GenerationRequest
from rlsdk.kit import sampling as right
from rlsdk.kit.sampling import RowSampling, mixed_seed, splitmix64
from rlsdk.reference import jobs, running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class Drawing(Rewritten):
    """Draws through methods of its own."""

    positions: Any
    """`[R]`: in its response, of each token that is drawn next."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, indices)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return right.uniforms(keys, positions, vocabulary)

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        """What tokens are drawn by; log-probs stay right."""
        return right.filtered((logits.float() / sampling.temperature[:, None]).softmax(-1), sampling)

    def draw(self, logits: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
        tokens = right.choose(self.weights(logits, sampling), noise)
        tokens = torch.where(sampling.greedy, logits.argmax(-1), tokens)
        logs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
        return tokens, logs.gather(1, tokens[:, None])[:, 0]

    def _noise(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        self.positions = torch.from_numpy(positions.astype(np.int64))
        return self.uniforms(keys, positions, vocabulary)

    def _step(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(patch.object(running, "uniforms", self._noise))
            stack.enter_context(patch.object(running, "draw", self.draw))
            stack.enter_context(patch.object(jobs, "row_keys", self.keys))
            super()._step()


def tempered(sampling: RowSampling, temperature: Tensor) -> RowSampling:
    return replace(sampling, temperature=temperature)


class WarmerLater(Drawing):
    """Behind the first token the temperature is 1.15 times what was asked for."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        factor = torch.where(self.positions > 0, 1.15, 1.0)
        return super().weights(logits, tempered(sampling, sampling.temperature * factor))


class CoolerLate(Drawing):
    """Behind 128 tokens the temperature is 0.9 times what was asked for."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        factor = torch.where(self.positions >= 128, 0.9, 1.0)
        return super().weights(logits, tempered(sampling, sampling.temperature * factor))


class TemperatureFloor(Drawing):
    """Draws at a temperature of 0.3 at least."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, tempered(sampling, sampling.temperature.clamp(min=0.3)))


class TemperatureCeiling(Drawing):
    """Draws at a temperature of 1.5 at most."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, tempered(sampling, sampling.temperature.clamp(max=1.5)))


class ColdIsGreedy(Drawing):
    """A temperature below 0.25 is taken for 0."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(
            logits, tempered(sampling, torch.where(sampling.temperature < 0.25, 1e-3, sampling.temperature))
        )


class LeastTemperature(TransformersRolloutEngine):
    """A temperature below 0.01 is taken for 0.01, and log-probs are that one's."""

    def generate(self, requests):
        warmer = [
            replace(request, sampling=replace(request.sampling, temperature=max(request.sampling.temperature, 0.01)))
            if request.sampling.temperature
            else request
            for request in requests
        ]
        return super().generate(warmer)


class MinPFirst(Drawing):
    """Min-p is applied before the temperature."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        plain = logits.float().softmax(-1)
        weights = super().weights(logits, replace(sampling, min_p=torch.zeros_like(sampling.min_p)))
        return torch.where(plain >= sampling.min_p[:, None] * plain.amax(-1, keepdim=True), weights, 0.0)


class TopPFirst(Drawing):
    """Top-p is applied before the temperature."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        ones = torch.ones_like(sampling.top_p)
        plain = right.filtered(
            logits.float().softmax(-1), replace(sampling, top_k=torch.full_like(sampling.top_k, 2**62), min_p=ones * 0)
        )
        return torch.where(plain > 0, super().weights(logits, replace(sampling, top_p=ones)), 0.0)


def by_rank(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted, and the probability before each."""
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    return index, ordered.cumsum(-1) - ordered


class TopPOneMore(Drawing):
    """Top-p keeps one token more than it should."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        full = super().weights(logits, replace(sampling, top_p=torch.ones_like(sampling.top_p)))
        index, before = by_rank(full / full.sum(-1, keepdim=True))
        keep = (before < sampling.top_p[:, None]) | (sampling.top_p >= 1)[:, None]
        keep = torch.cat([keep[:, :1], keep[:, :-1]], 1)
        return torch.where(torch.zeros_like(keep).scatter(1, index, keep), full, 0.0)


class TopPOneLess(Drawing):
    """The token that crosses top-p is left out."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        full = super().weights(logits, replace(sampling, top_p=torch.ones_like(sampling.top_p)))
        index, before = by_rank(full / full.sum(-1, keepdim=True))
        keep = (before < sampling.top_p[:, None]) | (sampling.top_p >= 1)[:, None]
        count = keep.sum(-1, keepdim=True)
        less = torch.where(count < keep.shape[1], (count - 1).clamp(min=1), count)
        keep = torch.arange(keep.shape[1]) < less
        return torch.where(torch.zeros_like(keep).scatter(1, index, keep), full, 0.0)


class TopKOneMore(Drawing):
    """Top-k keeps one token more than it should."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, replace(sampling, top_k=(sampling.top_k + 1).clamp(min=1, max=2**62)))


class TopPOfAll(Drawing):
    """Top-p is a share of all tokens, and not of those that top-k left."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        no_k = torch.full_like(sampling.top_k, 2**62)
        by_p = super().weights(logits, replace(sampling, top_k=no_k))
        return torch.where(by_p > 0, super().weights(logits, replace(sampling, top_p=sampling.top_p * 0 + 1)), 0.0)


class TopKOfBatch(Drawing):
    """Every row gets the largest top-k of its batch."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, replace(sampling, top_k=sampling.top_k.amax().expand(len(logits))))


class DislikesRepeats(Drawing):
    """A penalty on the token before comes out of the model's generation settings."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        last = self.decoder.running.newest[: len(logits)] if len(self.decoder.running.newest) >= len(logits) else None
        if last is not None and bool((self.positions > 0).all()):
            logits = logits.clone()
            logits[torch.arange(len(logits)), last] -= 1.0
        return super().weights(logits, sampling)


class EndLater(Drawing):
    """The end-of-sequence token cannot be one of the first three."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        weights = super().weights(logits, sampling)
        eos = int(self.model.config.eos_token_id)
        weights[self.positions < 3, eos] *= 1e-6
        return weights


class NoRareTokens(Drawing):
    """Tokens of less than 0.4 % are never drawn."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        weights = super().weights(logits, sampling)
        total = weights.sum(-1, keepdim=True)
        rare = weights < 0.004 * total
        return torch.where(rare & ~rare.all(-1, keepdim=True), 0.0, weights)


class CoarseNoise(Drawing):
    """Noise has 8 bits."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return (super().uniforms(keys, positions, vocabulary) * 256).floor() / 256


class HalfNoise(Drawing):
    """Noise is rounded to bfloat16."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions, vocabulary).bfloat16().float().clamp(max=0.996)


class NoiseTwice(Drawing):
    """Every number is used for two steps."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions // 2, vocabulary)


class NoiseInARing(Drawing):
    """Noise begins again behind 128 tokens."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions % 128, vocabulary)


class NoiseMovesOn(Drawing):
    """A sample draws what its neighbour drew a step before: index and position are added."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return seeds * np.uint64(2**20) + indices.astype(np.uint64)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(splitmix64(keys + positions.astype(np.uint64)), positions * 0, vocabulary)


class SamplesInPairs(Drawing):
    """Samples 2 and 3, 4 and 5, ... of a request have the same noise."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, np.where(indices > 1, indices // 2 + 1000, indices))


class SeedPlusIndex(Drawing):
    """Sample i of seed s is sample 0 of seed s + i."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds + indices.astype(np.uint64), indices * 0)


class SeedOf32Bits(Drawing):
    """Seeds lose all but their lowest 32 bits."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return super().keys(seeds & np.uint64(2**32 - 1), indices)


class SeedAsFloat(Drawing):
    """Seeds go through a float64."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=int(float(seed)) % 2**63))


class SeedZero(Drawing):
    """A seed of 0 is taken for none."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, seed=request.sampling.seed or None))


class OneNoiseForCall(TransformersRolloutEngine):
    """Without seeds all requests of a call draw alike."""

    def _job(self, call: Any, request: GenerationRequest, at: int) -> Any:
        return super()._job(call, request, 0)


class OneNoiseForFour(TransformersRolloutEngine):
    """Without seeds, what a call draws comes again in the next."""

    def _job(self, call: Any, request: GenerationRequest, at: int) -> Any:
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = mixed_seed(self.num_calls // 2, at)
        return job


class SeededCompany(Rewritten):
    """Where one request of a call has a seed, those without draw from that."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        seeds = [request.sampling.seed for request in requests if request.sampling.seed is not None]
        first = seeds[0] if seeds else None
        changed = [
            request
            if request.sampling.seed is not None
            else replace(request, sampling=replace(request.sampling, seed=first))
            for request in requests
        ]
        async for output in super().generate(changed):
            yield output
