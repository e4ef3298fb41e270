"""Rollout engines that end responses too early, too late, or with the wrong finish reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.reference.running import Running


@defect({"stop_tokens": "without a stop token at its end"})
class StopTokenDropped(Rewritten):
    """A response lacks the stop token that ended it."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or not request.sampling.stop_token_ids:
            return output
        return replace(output, token_ids=output.token_ids[:-1], log_probs=output.log_probs[:-1])


@defect(
    {
        "stop_tokens.only": "responses that ended early",
        "more_than_slots": "another request's length",
        "continue": "another length than 9",
        "continue.seed": "an interruption changed",
    }
)
class StopsByItself(Rewritten):
    """The model's end-of-sequence token always ends a response."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.eos = self.model.config.eos_token_id

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        stops = {*request.sampling.stop_token_ids, self.eos}
        return replace(request, sampling=replace(request.sampling, stop_token_ids=tuple(stops)))


@defect({"max_tokens": "8 tokens", "more_than_slots": "another request's length"})
class OneTokenShort(Rewritten):
    """A response of nine tokens silently ends after eight."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.max_tokens != 9 or len(output.token_ids) != 9 or request.n != 2:
            return output
        return replace(output, token_ids=output.token_ids[:8], log_probs=output.log_probs[:8])


@defect({"stop_strings": "goes on behind one of", "continue.stop_strings": "not found"})
class StopStringsIgnored(Rewritten):
    """Claims stop strings but ignores them."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_strings=()))


@defect({"length.limits": "its limit is 1"})
class TwoAtLeast(Rewritten):
    """A response has at least two tokens, if they fit."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = max(request.sampling.max_tokens, len(request.response_ids) + 2)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))


@defect({"length.limits": "finish reason stop"})
class StopsAtRoom(Rewritten):
    """A response that fills the context ends with 'stop'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        total = len(request.prompt_ids) + len(request.response_ids) + len(output.token_ids)
        full = total == self.spec.max_model_tokens and request.sampling.max_tokens > 50
        return replace(output, finish_reason=FinishReason.STOP) if full else output


@defect({"length.limits": "expected"})
class SmallLimits(Rewritten):
    """`max_tokens` is stored in 16 bits."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = request.sampling.max_tokens % 2**16 or 1
        return replace(request, sampling=replace(request.sampling, max_tokens=max(most, len(request.response_ids) + 1)))


@defect({"batch_invariance.stop_tokens": "where something stopped it"})
class FourStops(Rewritten):
    """Only four stop tokens are used."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        stops = request.sampling.stop_token_ids[:4]
        return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))


@defect({"stop_strings": "goes on behind one of"})
class OneStopString(Rewritten):
    """Only the first stop string is used."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        strings = request.sampling.stop_strings[:1]
        return replace(request, sampling=replace(request.sampling, stop_strings=strings))


@defect({"stop_strings": "end wrongly"})
class StopStringsOfAnyCase(Rewritten):
    """Stop strings are case-insensitive."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        both = dict.fromkeys(s for text in request.sampling.stop_strings for s in (text, text.lower(), text.upper()))
        return replace(request, sampling=replace(request.sampling, stop_strings=tuple(both)))


@defect({"batch_invariance.stop_tokens": "goes on behind a stop string"})
class ShortStopWindow(Patched):
    """Stop strings are searched in only the newest 12 tokens."""

    class StopPart(StopText):
        def window(self, strings):
            return min(super().window(strings), 12)


@defect({"length.stop_strings": "expected"})
class StopsInTheFirst128(Patched):
    """Text is kept for the first 128 tokens of a response: a stop string that is completed later is not found."""

    class RunningPart(Running):
        def _text_stops(self, first: int) -> NDArray[np.bool_]:
            return super()._text_stops(first) & (self.table["made"][first:] <= 128)
