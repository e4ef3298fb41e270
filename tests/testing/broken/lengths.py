"""Rollout engines that are right about short texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from broken.rollout import BeforeTemperature, Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest


def shortened(output: GenerationOutput, length: int, **fields: Any) -> GenerationOutput:
    """The beginning of a sample of one version."""
    return replace(
        output,
        token_ids=output.token_ids[:length],
        log_probs=output.log_probs[:length],
        versions=(replace(output.versions[0], num_tokens=length),),
        **fields,
    )


class DriftsLate(Rewritten):
    """Behind 256 tokens log-probs are off by a thousandth for each token."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        late = (np.arange(len(output.log_probs)) - 256).clip(min=0)
        return replace(output, log_probs=(output.log_probs - 1e-3 * late).astype(np.float32))


class OneLateBehind128(Rewritten):
    """From token 128 on each log-prob is that of the token before."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        logs = output.log_probs.copy()
        logs[129:] = output.log_probs[128:-1]
        return replace(output, log_probs=logs)


class PagesLogProbs(Rewritten):
    """Log-probs are put together of pages of 64, the last two swapped."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(output.log_probs) < 192:
            return output
        logs = output.log_probs.copy()
        logs[64:128], logs[128:192] = output.log_probs[128:192], output.log_probs[64:128]
        return replace(output, log_probs=logs)


class Window256(Rewritten):
    """Of a longer prompt the last 256 tokens are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        left = self.spec.max_model_tokens - len(ids)
        most = min(request.sampling.max_tokens, left)
        return replace(request, prompt_ids=ids[-256:], sampling=replace(request.sampling, max_tokens=most))


class ForgetsAtPages(Rewritten):
    """A prompt of whole pages of 64 tokens loses its first."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        if len(ids) % 64:
            return request
        most = min(request.sampling.max_tokens, self.spec.max_model_tokens - len(ids))
        return replace(request, prompt_ids=ids[1:], sampling=replace(request.sampling, max_tokens=most))


class BeginsTwice(Rewritten):
    """A prompt of one token is read as two of them."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if len(request.prompt_ids) > 1:
            return request
        return replace(request, prompt_ids=request.prompt_ids * 2)


class LeaksIntoNeighbour(Rewritten):
    """The second of two prompts of more than 200 tokens sees the last token of the first."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        long = [request for request in requests if len(request.prompt_ids) > 200]
        leaky = list(requests)
        if len(long) > 1:
            at = leaky.index(long[1])
            leaky[at] = replace(long[1], prompt_ids=(long[0].prompt_ids[-1], *long[1].prompt_ids[1:]))
        async for output in super().generate(leaky):
            yield output


class SharesPrefix(BeforeTemperature):
    """Prompts with the same first 128 tokens are taken for the same up to token 130."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        first: dict[Any, Any] = {}
        same = []
        for request in requests:
            ids = request.prompt_ids
            known = first.setdefault(ids[:128], ids) if len(ids) >= 130 else ids
            same.append(replace(request, prompt_ids=(*known[:130], *ids[130:])) if len(known) >= 130 else request)
        async for output in super().generate(same):
            yield output


class RoomLessOne(Rewritten):
    """The last place of the model's room is never used."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        length = len(output.token_ids)
        total = len(request.prompt_ids) + len(request.response_ids) + length
        if total < self.spec.max_model_tokens or length < 2:
            return output
        return shortened(output, length - 1, finish_reason=FinishReason.LENGTH)


class TwoAtLeast(Rewritten):
    """A response has two tokens at least, where there is room."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = max(request.sampling.max_tokens, len(request.response_ids) + 2)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))


class StopsAtRoom(Rewritten):
    """A response that fills the model's room ends by 'stop'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        total = len(request.prompt_ids) + len(request.response_ids) + len(output.token_ids)
        full = total == self.spec.max_model_tokens and request.sampling.max_tokens > 50
        return replace(output, finish_reason=FinishReason.STOP) if full else output


class SmallLimits(Rewritten):
    """`max_tokens` is kept in 16 bits."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = request.sampling.max_tokens % 2**16 or 1
        return replace(request, sampling=replace(request.sampling, max_tokens=max(most, len(request.response_ids) + 1)))


class ForgetsLongResponse(Rewritten):
    """Of a response that is continued the last 128 tokens are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        given = request.response_ids
        cut = max(len(given) - 128, 0)
        most = min(request.sampling.max_tokens, self.spec.max_model_tokens - len(request.prompt_ids)) - cut
        return replace(request, response_ids=given[cut:], sampling=replace(request.sampling, max_tokens=most))
