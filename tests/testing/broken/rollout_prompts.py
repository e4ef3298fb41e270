"""Rollout engines that misread prompts: truncated, shifted, or confused with others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from broken.rollout_base import Patched, Rewritten
from broken.rollout_log_probs import BeforeTemperature
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.reference.rows import PositionedRows


class PromptCut(Rewritten):
    """Prompts of more than 100 tokens silently lose their beginning."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        return replace(request, prompt_ids=ids[-100:]) if self.spec.max_model_tokens - 1 == len(ids) else request

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(request.prompt_ids) != self.spec.max_model_tokens - 1:
            return output
        one = {"token_ids": output.token_ids[:1], "log_probs": output.log_probs[:1]}
        return replace(output, finish_reason=FinishReason.LENGTH, **one)


class NothingRefused(Rewritten):
    """A prompt that does not fit is truncated."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, prompt_ids=request.prompt_ids[: self.spec.max_model_tokens - 1] or (5,))


class Window256(Rewritten):
    """Only the last 256 tokens of a longer prompt are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        left = self.spec.max_model_tokens - len(ids)
        most = min(request.sampling.max_tokens, left)
        return replace(request, prompt_ids=ids[-256:], sampling=replace(request.sampling, max_tokens=most))


class ForgetsAtPages(Rewritten):
    """A prompt of whole pages of 64 tokens loses its first page."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        if len(ids) % 64:
            return request
        most = min(request.sampling.max_tokens, self.spec.max_model_tokens - len(ids))
        return replace(request, prompt_ids=ids[1:], sampling=replace(request.sampling, max_tokens=most))


class BeginsTwice(Rewritten):
    """The token of a one-token prompt is read twice."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if len(request.prompt_ids) > 1:
            return request
        return replace(request, prompt_ids=request.prompt_ids * 2)


class LeaksIntoNeighbour(Rewritten):
    """The second of two prompts of more than 200 tokens attends to the last token of the first."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        long = [request for request in requests if len(request.prompt_ids) > 200]
        leaky = list(requests)
        if len(long) > 1:
            at = leaky.index(long[1])
            leaky[at] = replace(long[1], prompt_ids=(long[0].prompt_ids[-1], *long[1].prompt_ids[1:]))
        async for output in super().generate(leaky):
            yield output


class SharesPrefix(BeforeTemperature):
    """Prompts with the same first 128 tokens are treated as equal up to token 130."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        first: dict[Any, Any] = {}
        same = []
        for request in requests:
            ids = request.prompt_ids
            known = first.setdefault(ids[:128], ids) if len(ids) >= 130 else ids
            same.append(replace(request, prompt_ids=(*known[:130], *ids[130:])) if len(known) >= 130 else request)
        async for output in super().generate(same):
            yield output


class ForgetsLongResponse(Rewritten):
    """Only the last 128 tokens of a given response are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        given = request.response_ids
        cut = max(len(given) - 128, 0)
        most = min(request.sampling.max_tokens, self.spec.max_model_tokens - len(request.prompt_ids)) - cut
        return replace(request, response_ids=given[cut:], sampling=replace(request.sampling, max_tokens=most))


class PadsMasked(Rewritten):
    """Tokens with the padding id are masked."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        pad = self.model.config.pad_token_id
        ids = tuple(token for token in request.prompt_ids if token != pad) or request.prompt_ids
        return replace(request, prompt_ids=ids)


class CutAtEnd(Rewritten):
    """A prompt is read only after its last end-of-sequence token."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        eos, ids = self.model.config.eos_token_id, request.prompt_ids
        ends = [at for at, token in enumerate(ids[:-1]) if token == eos]
        return replace(request, prompt_ids=ids[ends[-1] + 1 :]) if ends else request


class KeyedByTail(Patched):
    """Prompts of one length with the same last 16 tokens share a KV cache."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            known = {}
            return super().prefill([known.setdefault((len(p), *p[-16:].tolist()), p) for p in prompts])


class EndFirstIsDropped(Rewritten):
    """If a prompt begins with the end-of-sequence token, this token is dropped."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.eos = self.model.config.eos_token_id

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        return replace(request, prompt_ids=ids[1:]) if len(ids) > 1 and ids[0] == self.eos else request
