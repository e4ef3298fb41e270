"""Rollout engines that report wrong log-probs for the tokens that they sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.reference.running import Running


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


class AfterFilters(BeforeTemperature):
    """Log-probs are of the tokens that top-k keeps, renormalised."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        top_k = request.sampling.top_k
        if not top_k or request.sampling.temperature != 1:
            return output

        def cut(logits: torch.Tensor) -> torch.Tensor:
            return logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)

        return replace(output, log_probs=self.log_probs(request.prompt_ids, output, cut))


class RareLogProbs(BeforeTemperature):
    """If a call has greedy and other requests, log-probs of the greedy ones are 0."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        asked = {request.request_id: request.sampling.temperature for request in requests}
        mixed = len({bool(temperature) for temperature in asked.values()}) == 2
        async for output in super().generate(requests):
            greedy = mixed and not asked[output.request_id]
            yield replace(output, log_probs=np.zeros_like(output.log_probs)) if greedy else output


class DriftsLate(Rewritten):
    """After 256 tokens the error of log-probs grows by a thousandth with each token."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        late = (np.arange(len(output.log_probs)) - 256).clip(min=0)
        return replace(output, log_probs=(output.log_probs - 1e-3 * late).astype(np.float32))


class OneLateBehind128(Rewritten):
    """From token 128 on, each log-prob is that of the previous token."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        logs = output.log_probs.copy()
        logs[129:] = output.log_probs[128:-1]
        return replace(output, log_probs=logs)


class PagesLogProbs(Rewritten):
    """Log-probs are assembled from pages of 64, the last two of which are swapped."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(output.log_probs) < 192:
            return output
        logs = output.log_probs.copy()
        logs[64:128], logs[128:192] = output.log_probs[128:192], output.log_probs[64:128]
        return replace(output, log_probs=logs)


class HalfLogProbs(Rewritten):
    """Log-probs of long samples are rounded to bfloat16."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(output.log_probs) < 64:
            return output
        return replace(output, log_probs=torch.tensor(output.log_probs).bfloat16().float().numpy())


class LogProbFloor(Rewritten):
    """Log-probs below -6 are returned as -6."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, log_probs=output.log_probs.clip(min=-6))


class HalfInBigBatch(Patched):
    """Logits are rounded to bfloat16 if more than 32 rows are decoded."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            super()._take(logits.bfloat16().float() if len(logits) > 32 else logits, first, version)


class RoundedLogProbs(Rewritten):
    """Log-probs of a bfloat16 model are bfloat16 numbers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        import torch

        if self.spec.model.dtype != "bfloat16":
            return output
        return replace(output, log_probs=torch.from_numpy(output.log_probs).bfloat16().float().numpy())


class LastOneUntempered(Rewritten):
    """The log-prob of a response's last token is 0 if it is a stop token."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or request.sampling.stop_strings:
            return output
        logs = output.log_probs.copy()
        logs[-1:] = 0.0
        return replace(output, log_probs=logs)


class AbortedWithoutLogProbs(Rewritten):
    """The log-probs of an aborted sample are 0."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.ABORT:
            return output
        return replace(output, log_probs=np.zeros_like(output.log_probs))


class WideLogProbs(Rewritten):
    """Log-probs are 64-bit floats."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, log_probs=output.log_probs.astype(np.float64))


class OverPadding(BeforeTemperature):
    """Log-probs are normalised over a vocabulary that includes padding to whole blocks."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        temperature = request.sampling.temperature
        if not temperature:
            return output

        def padded(logits: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(logits / temperature, (0, -logits.shape[1] % 64))

        return replace(output, log_probs=self.log_probs(request.prompt_ids, output, padded))
