"""Rollout engines that sample from another distribution than requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broken.defect import defect
from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest
from rlsdk.kit.generation.sampling import RowSampling
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"distribution.filtered": "p-value"})
class NarrowTopP(Rewritten):
    """Top-p keeps fewer tokens than requested."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, top_p=request.sampling.top_p**2))


@defect({"greedy": "largest difference of log-probs"})
class GreedyIsWarm(Rewritten):
    """Temperature 0 is replaced with a very low one, and log-probs are of that temperature."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature:
            return output
        return replace(output, log_probs=np.zeros_like(output.log_probs))


@defect({"min_p": "below min-p"})
class MinPIgnored(Rewritten):
    """Claims min-p but ignores it."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, min_p=0.0))


def tempered(sampling: RowSampling, temperature: Tensor) -> RowSampling:
    return replace(sampling, temperature=temperature)


@defect({"length.responses": "deviations of log-probability"})
class CoolerLate(Drawing):
    """After 128 tokens the temperature is 0.9 times the requested one."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        factor = torch.where(self.positions >= 128, 0.9, 1.0)
        return super().weights(logits, tempered(sampling, sampling.temperature * factor))


@defect({"distribution.responses": "temperature 2"})
class TemperatureCeiling(Drawing):
    """Draws at a temperature of at most 1.5."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, tempered(sampling, sampling.temperature.clamp(max=1.5)))


@defect({"distribution.low_temperature": "wrong samples"})
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


@defect({"distribution.responses": "left out by the filters"})
class TopKOneMore(Drawing):
    """Top-k keeps one token more than it should."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, replace(sampling, top_k=(sampling.top_k + 1).clamp(min=1, max=2**62)))


@defect({"distribution.sequences": "p-value of the end"})
class EndLater(Drawing):
    """The end-of-sequence token cannot be one of the first three."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        weights = super().weights(logits, sampling)
        eos = int(self.model.config.eos_token_id)
        weights[self.positions < 3, eos] *= 1e-6
        return weights


@defect({"distribution.responses": ""})
class MinPTempered(Drawing):
    """Min-p is divided by the temperature."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        return super().weights(logits, replace(sampling, min_p=(sampling.min_p / sampling.temperature).clamp(max=1)))


@defect({"distribution.greedy": "is not the most probable"})
class GreedyAlmost(Drawing):
    """Greedy takes the first token within 2 % of the most probable one."""

    def draw(self, logits: torch.Tensor, sampling: RowSampling, noise: torch.Tensor) -> Any:
        tokens, logs = super().draw(logits, sampling, noise)
        near = (logits >= logits.amax(-1, keepdim=True) - 0.02).int().argmax(-1)
        tokens = torch.where(sampling.greedy, near, tokens)
        logs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
        return tokens, logs.gather(1, tokens[:, None])[:, 0]


@defect({"distribution.special_tokens": "p-value of special token"})
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
