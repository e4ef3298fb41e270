"""Rollout engines that misread prompts: truncated, shifted, or confused with others."""

from __future__ import annotations

from dataclasses import replace

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.reference.rows import PositionedRows


@defect({"longest_prompt": "largest difference"})
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


@defect({"refusals": "accepted"})
class NothingRefused(Rewritten):
    """A prompt that does not fit is truncated."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, prompt_ids=request.prompt_ids[: self.spec.max_model_tokens - 1] or (5,))


@defect({"length.prompts": "log-prob 0"})
class Window256(Rewritten):
    """Only the last 256 tokens of a longer prompt are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        left = self.spec.max_model_tokens - len(ids)
        most = min(request.sampling.max_tokens, left)
        return replace(request, prompt_ids=ids[-256:], sampling=replace(request.sampling, max_tokens=most))


@defect({"length.prompts": "sample 'p1'/0: log-prob"})
class BeginsTwice(Rewritten):
    """The token of a one-token prompt is read twice."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if len(request.prompt_ids) > 1:
            return request
        return replace(request, prompt_ids=request.prompt_ids * 2)


@defect({"length.continued": "log-prob 0"})
class ForgetsLongResponse(Rewritten):
    """Only the last 128 tokens of a given response are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        given = request.response_ids
        cut = max(len(given) - 128, 0)
        most = min(request.sampling.max_tokens, self.spec.max_model_tokens - len(request.prompt_ids)) - cut
        return replace(request, response_ids=given[cut:], sampling=replace(request.sampling, max_tokens=most))


@defect({"any_token": "log-prob"})
class CutAtEnd(Rewritten):
    """A prompt is read only after its last end-of-sequence token."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        eos, ids = self.model.config.eos_token_id, request.prompt_ids
        ends = [at for at, token in enumerate(ids[:-1]) if token == eos]
        return replace(request, prompt_ids=ids[ends[-1] + 1 :]) if ends else request


@defect({"batch_invariance.similar_prompts": "log-prob"})
class KeyedByTail(Patched):
    """Prompts of one length with the same last 16 tokens share a KV cache."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            known = {}
            return super().prefill([known.setdefault((len(p), *p[-16:].tolist()), p) for p in prompts])
