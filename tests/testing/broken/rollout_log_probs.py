"""Rollout engines that report wrong log-probs for the tokens that they sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.defect import defect
from broken.rollout_base import Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest


@defect({"log_probs.temperature": "temperature 0.6"})
class BeforeTemperature(Rewritten):
    """Log-probs are of the logits before the division by the temperature."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature in (0, 1):
            return output
        return replace(output, log_probs=self.log_probs(request.prompt_ids, output, lambda logits: logits))

    def log_probs(self, prompt: Sequence[int], output: GenerationOutput, change: Any) -> Any:
        tokens = output.token_ids.tolist()
        with torch.no_grad():
            logits = self.plain(torch.tensor([[*prompt, *tokens]]))[len(prompt) - 1 : -1]
        return change(logits).log_softmax(-1)[range(len(tokens)), tokens].numpy().astype(np.float32)

    def plain(self, row: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=row, use_cache=False).logits[0].float()
        return logits


@defect({"log_probs.filters": "largest difference with top-k"})
class AfterFilters(BeforeTemperature):
    """Log-probs are of the tokens that top-k keeps, renormalised."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        top_k = request.sampling.top_k
        if not top_k or request.sampling.temperature != 1:
            return output

        def cut(logits: torch.Tensor) -> torch.Tensor:
            return logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)

        return replace(output, log_probs=self.log_probs(request.prompt_ids, output, cut))


@defect({"prompt_log_probs": "largest difference"})
class PromptsAtTheTemperature(Rewritten):
    """Log-probs of the most probable tokens in the place of a prompt's are divided by the temperature, as those of
    sampled tokens would be."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        found = output.prompt_log_probs
        if found is None:
            return output
        colder = found.top_log_probs / np.float32(request.sampling.temperature)
        return replace(output, prompt_log_probs=replace(found, top_log_probs=colder))


@defect({"prompt_log_probs": "wrong forms"})
class PromptsOneShort(Rewritten):
    """The last token of a prompt has no log-prob."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        found = output.prompt_log_probs
        if found is None:
            return output
        return replace(output, prompt_log_probs=replace(found, log_probs=found.log_probs[:-1]))


@defect({"prompt_log_probs.refusals": "accepted"})
class CutsTheCount(Rewritten):
    """More of the most probable tokens than there are is taken for all of them."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        count = request.prompt_log_probs
        return request if count is None else replace(request, prompt_log_probs=min(max(count, 0), self.vocabulary))


@defect({"length.responses": "log-prob 257"})
class DriftsLate(Rewritten):
    """After 256 tokens the error of log-probs grows by a thousandth with each token."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        late = (np.arange(len(output.log_probs)) - 256).clip(min=0)
        return replace(output, log_probs=(output.log_probs - 1e-3 * late).astype(np.float32))


@defect({"any_token": "log-prob"})
class LogProbFloor(Rewritten):
    """Log-probs below -6 are returned as -6."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, log_probs=output.log_probs.clip(min=-6))


@defect({"batch_invariance.kinds": "float64"})
class WideLogProbs(Rewritten):
    """Log-probs are 64-bit floats."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, log_probs=output.log_probs.astype(np.float64))
