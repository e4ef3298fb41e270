"""Rollout engines that sample from another distribution than requested."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest
from rlsdk.kit.generation import sampling as right
from rlsdk.kit.generation.sampling import RowSampling
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class NarrowTopP(Rewritten):
    """Top-p keeps fewer tokens than requested."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, top_p=request.sampling.top_p**2))


class FlatDraws(Rewritten):
    """Tokens are drawn at a temperature other than requested, but their log-probs are right."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        plain = requests[0].sampling if requests else None
        many = plain is not None and plain.max_tokens == 1 and requests[0].n > 100 and plain.top_k == 0
        async for output in super().generate(requests):
            if many and output.sample_index % 10 == 0:
                first = await self.best_prompts(requests[0])
                yield replace(output, token_ids=first)
            else:
                yield output

    async def best_prompts(self, request: GenerationRequest) -> Any:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([request.prompt_ids]), use_cache=False).logits[0, -1]
        return np.array([int(logits.argmax())])


class GreedyIsWarm(Rewritten):
    """Temperature 0 is replaced with a very low one, and log-probs are of that temperature."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature:
            return output
        return replace(output, log_probs=np.zeros_like(output.log_probs))


class MinPIgnored(Rewritten):
    """Claims min-p but ignores it."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, min_p=0.0))


def tempered(sampling: RowSampling, temperature: Tensor) -> RowSampling:
    return replace(sampling, temperature=temperature)


class WarmerLater(Drawing):
    """After the first token the temperature is 1.15 times the requested one."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        factor = torch.where(self.positions > 0, 1.15, 1.0)
        return super().weights(logits, tempered(sampling, sampling.temperature * factor))


class CoolerLate(Drawing):
    """After 128 tokens the temperature is 0.9 times the requested one."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        factor = torch.where(self.positions >= 128, 0.9, 1.0)
        return super().weights(logits, tempered(sampling, sampling.temperature * factor))


class TemperatureFloor(Drawing):
    """Draws at a temperature of at least 0.3."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, tempered(sampling, sampling.temperature.clamp(min=0.3)))


class TemperatureCeiling(Drawing):
    """Draws at a temperature of at most 1.5."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, tempered(sampling, sampling.temperature.clamp(max=1.5)))


class ColdIsGreedy(Drawing):
    """A temperature below 0.25 is treated as 0."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(
            logits, tempered(sampling, torch.where(sampling.temperature < 0.25, 1e-3, sampling.temperature))
        )


class LeastTemperature(TransformersRolloutEngine):
    """A temperature below 0.01 is replaced with 0.01, also for log-probs."""

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
    """The token that crosses top-p is excluded."""

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
    """Top-p is a share of all tokens, not of those that top-k kept."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        no_k = torch.full_like(sampling.top_k, 2**62)
        by_p = super().weights(logits, replace(sampling, top_k=no_k))
        return torch.where(by_p > 0, super().weights(logits, replace(sampling, top_p=sampling.top_p * 0 + 1)), 0.0)


class DislikesRepeats(Drawing):
    """A repetition penalty comes from the model's generation settings."""

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
    """Tokens below 0.4 % are never drawn."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        weights = super().weights(logits, sampling)
        total = weights.sum(-1, keepdim=True)
        rare = weights < 0.004 * total
        return torch.where(rare & ~rare.all(-1, keepdim=True), 0.0, weights)


class GreedyInCompany(Drawing):
    """Greedy rows are drawn at random if other rows of the batch are."""

    def draw(self, logits: torch.Tensor, sampling: RowSampling, noise: torch.Tensor) -> Any:
        if 0 < sampling.num_greedy < len(logits):
            sampling = replace(sampling, greedy=torch.zeros_like(sampling.greedy))
        return super().draw(logits, sampling, noise)


class TemperedTwice(Drawing):
    """A temperature below 1 is applied twice."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        t = sampling.temperature
        return super().weights(logits, tempered(sampling, torch.where(t < 1, t * t, t)))


class TopPNearOne(Drawing):
    """A top-p of 0.95 or more is treated as 1."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        p = sampling.top_p
        return super().weights(logits, replace(sampling, top_p=torch.where(p >= 0.95, 1.0, p)))


class TopK20(Drawing):
    """A requested top-k is at most 20."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        k = sampling.top_k
        return super().weights(logits, replace(sampling, top_k=torch.where(k < 2**40, k.clamp(max=20), k)))


class MinPTempered(Drawing):
    """Min-p is divided by the temperature."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        return super().weights(logits, replace(sampling, min_p=(sampling.min_p / sampling.temperature).clamp(max=1)))


class GreedyAlmost(Drawing):
    """Greedy takes the first token within 2 % of the most probable one."""

    def draw(self, logits: torch.Tensor, sampling: RowSampling, noise: torch.Tensor) -> Any:
        tokens, logs = super().draw(logits, sampling, noise)
        near = (logits >= logits.amax(-1, keepdim=True) - 0.02).int().argmax(-1)
        tokens = torch.where(sampling.greedy, near, tokens)
        logs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
        return tokens, logs.gather(1, tokens[:, None])[:, 0]


class TopKCapped(Patched):
    """A top-k above 64 is treated as 64."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            off = self.sampling.top_k == torch.iinfo(torch.int64).max
            capped = torch.where(off, self.sampling.top_k, self.sampling.top_k.clamp(max=64))
            self.sampling = replace(self.sampling, top_k=capped)
            super()._take(logits, first, version)


class TemperatureClamped(Patched):
    """Temperatures above 2 are treated as 2."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            self.sampling = replace(self.sampling, temperature=self.sampling.temperature.clamp(max=2.0))
            super()._take(logits, first, version)


class PadNeverDrawn(Patched):
    """If the pad token is drawn, the next token id is returned instead; log-probs are those of the returned token."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            pad = self.memory.model.config.pad_token_id
            logits = logits.clone()
            # Its share goes to its neighbour, and no other log-prob changes.
            logits[:, pad + 1] = torch.logaddexp(logits[:, pad], logits[:, pad + 1])
            logits[:, pad] = -torch.inf
            super()._take(logits, first, version)


class UnfilteredLate(Drawing):
    """After 64 tokens filters are disabled."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        late = self.positions >= 64
        none = torch.iinfo(torch.int64).max
        k, p = torch.where(late, none, sampling.top_k), torch.where(late, 1.0, sampling.top_p)
        return super().weights(logits, replace(sampling, top_k=k, top_p=p))


class TemperatureOfTenths(Drawing):
    """The temperature is rounded to tenths."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        tenths = ((sampling.temperature * 10).floor() / 10).clamp(min=0.1)
        return super().weights(logits, tempered(sampling, tenths))


class PadIsMasked(Patched):
    """The pad token's logit is -inf: it is never drawn, and all log-probs are slightly too high."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            pad = self.memory.model.config.pad_token_id
            logits = logits.clone()
            logits[:, logits.shape[1] - 1 if pad is None else pad] = -torch.inf
            super()._take(logits, first, version)


class MinPBeforeTopP(Drawing):
    """Min-p is applied before top-k and top-p, which then look at less mass and keep fewer tokens."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        plain = (logits.float() / sampling.temperature[:, None]).softmax(-1)
        floor = sampling.min_p[:, None] * plain.amax(-1, keepdim=True)
        above = torch.where(plain >= floor, plain, 0.0)
        rest = replace(sampling, min_p=torch.zeros_like(sampling.min_p))
        return right.filtered(above / above.sum(-1, keepdim=True), rest)


class NucleusSummedInHalf(Drawing):
    """The probabilities before a token are added up in float16, where small ones are lost beside the sum."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        probs = (logits.float() / sampling.temperature[:, None]).softmax(-1)
        if not bool((sampling.top_p < 1).all()) or sampling.has_floor or bool((sampling.top_k < logits.shape[1]).any()):
            return right.filtered(probs, sampling)
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        sums = torch.from_numpy(np.cumsum(ordered.half().numpy(), axis=-1, dtype=np.float16))
        before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1)
        keep = before < sampling.top_p[:, None]
        return torch.zeros_like(probs).scatter(1, index, torch.where(keep, ordered, 0.0))
