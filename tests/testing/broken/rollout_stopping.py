"""Rollout engines that end responses too early, too late, or with the wrong finish reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.reference.running import Running


class StopTokenDropped(Rewritten):
    """A response lacks the stop token that ended it."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or not request.sampling.stop_token_ids:
            return output
        return replace(output, token_ids=output.token_ids[:-1], log_probs=output.log_probs[:-1])


class StopsByItself(Rewritten):
    """The model's end-of-sequence token always ends a response."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.eos = self.model.config.eos_token_id

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        stops = {*request.sampling.stop_token_ids, self.eos}
        return replace(request, sampling=replace(request.sampling, stop_token_ids=tuple(stops)))


class OneTokenShort(Rewritten):
    """A response of nine tokens silently ends after eight."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.max_tokens != 9 or len(output.token_ids) != 9 or request.n != 2:
            return output
        return replace(output, token_ids=output.token_ids[:8], log_probs=output.log_probs[:8])


class StopStringsIgnored(Rewritten):
    """Claims stop strings but ignores them."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_strings=()))


class GivenAgain(Rewritten):
    """Given response tokens are returned with the new ones."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        count = len(request.response_ids)
        return replace(
            output,
            token_ids=np.concatenate([np.array(request.response_ids, np.int64), output.token_ids]),
            log_probs=np.concatenate([np.zeros(count, np.float32), output.log_probs]),
        )


class GivenUncounted(Rewritten):
    """`max_tokens` does not count given response tokens."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        more = request.sampling.max_tokens + len(request.response_ids)
        return replace(request, sampling=replace(request.sampling, max_tokens=more))


class StopsOfOthers(Rewritten):
    """A stop token of one request applies to its whole call."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        every = tuple({token for request in requests for token in request.sampling.stop_token_ids})
        async for output in super().generate(
            [replace(request, sampling=replace(request.sampling, stop_token_ids=every)) for request in requests]
        ):
            yield output


def shortened(output: GenerationOutput, length: int, **fields: Any) -> GenerationOutput:
    """The beginning of a sample of one version."""
    return replace(
        output,
        token_ids=output.token_ids[:length],
        log_probs=output.log_probs[:length],
        versions=(replace(output.versions[0], num_tokens=length),),
        **fields,
    )


class FirstNeverStops(Rewritten):
    """A stop token does not stop if it is the first token."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        stops = set(request.sampling.stop_token_ids)
        ends = [at for at, token in enumerate(output.token_ids.tolist()) if at and token in stops]
        if not ends or output.finish_reason is FinishReason.ABORT:
            return output
        return shortened(output, ends[0] + 1, finish_reason=FinishReason.STOP)


class LengthBeforeStop(Rewritten):
    """A stop token at the limit is reported as 'length'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        full = len(output.token_ids) + len(request.response_ids) == request.sampling.max_tokens
        return replace(output, finish_reason=FinishReason.LENGTH) if full else output


class StopsByPrompt(Rewritten):
    """Stop strings are also searched in the end of the prompt."""

    class _Text(StopText):
        prompts: dict[tuple[str, ...], tuple[int, ...]]

        def ended(self, strings: Any, ids: Any, prior: Any = ()) -> bool:
            return super().ended(strings, ids, (*self.prompts.get(tuple(strings), ())[-3:], *prior))

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.text = self._Text(spec.model)
        self.text.prompts = {}
        self.decoder.running.stop_text = self.text

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.text.prompts[request.sampling.stop_strings] = request.prompt_ids
        return request


class StopsByOneToken(Rewritten):
    """A stop string is found only if a single token contains it."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        short = tuple(string for string in request.sampling.stop_strings if len(string) == 1)
        return replace(request, sampling=replace(request.sampling, stop_strings=short))


class LimitOfBatch(Rewritten):
    """In a batch with different limits, samples run to the longest limit and are cut without their last token."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        await asyncio.sleep(0)
        mixed = len({request.sampling.max_tokens for request in requests}) > 8
        async for output in super().generate(requests):
            full = output.finish_reason is FinishReason.LENGTH and len(output.token_ids) > 30
            yield shortened(output, len(output.token_ids) - 1) if mixed and full else output


class RoomLessOne(Rewritten):
    """The last position of the context is never used."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        length = len(output.token_ids)
        total = len(request.prompt_ids) + len(request.response_ids) + length
        if total < self.spec.max_model_tokens or length < 2:
            return output
        return shortened(output, length - 1, finish_reason=FinishReason.LENGTH)


class TwoAtLeast(Rewritten):
    """A response has at least two tokens, if they fit."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = max(request.sampling.max_tokens, len(request.response_ids) + 2)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))


class StopsAtRoom(Rewritten):
    """A response that fills the context ends with 'stop'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        total = len(request.prompt_ids) + len(request.response_ids) + len(output.token_ids)
        full = total == self.spec.max_model_tokens and request.sampling.max_tokens > 50
        return replace(output, finish_reason=FinishReason.STOP) if full else output


class SmallLimits(Rewritten):
    """`max_tokens` is stored in 16 bits."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = request.sampling.max_tokens % 2**16 or 1
        return replace(request, sampling=replace(request.sampling, max_tokens=max(most, len(request.response_ids) + 1)))


class FourStops(Rewritten):
    """Only four stop tokens are used."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        stops = request.sampling.stop_token_ids[:4]
        return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))


class OneStopString(Rewritten):
    """Only the first stop string is used."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        strings = request.sampling.stop_strings[:1]
        return replace(request, sampling=replace(request.sampling, stop_strings=strings))


class LimitsTheFirstOfGroup(Rewritten):
    """Sample 0 of a group of more than 10 has one token too few."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.n <= 10 or output.sample_index or output.finish_reason is not FinishReason.LENGTH:
            return output
        length = len(output.token_ids) - 1
        return replace(
            output,
            token_ids=output.token_ids[:length],
            log_probs=output.log_probs[:length],
            versions=(replace(output.versions[0], num_tokens=length),),
        ) if length else output  # fmt: skip


class StopsOf48Rows(Patched):
    """Stop tokens are checked only in the first 48 rows of a step."""

    class RunningPart(Running):
        def _sampling_of(self, rows):
            found = super()._sampling_of(rows)
            stops = found.stops.clone()
            stops[48:] = -1
            return replace(found, stops=stops)


class LessRoomBehindLong(Rewritten):
    """A prompt of more than 256 tokens gets at most 64 new tokens."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if len(request.prompt_ids) <= 256:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=min(request.sampling.max_tokens, 64)))


class ManyIgnoreStops(Rewritten):
    """Samples 4 and later of a request ignore stop tokens."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        stops = set(request.sampling.stop_token_ids)
        ends = [at for at, token in enumerate(output.token_ids.tolist()) if token in stops]
        if not ends or output.sample_index >= 4 or output.finish_reason is FinishReason.ABORT:
            return output
        return shortened(output, ends[0] + 1, finish_reason=FinishReason.STOP)


class StopStringCut(Rewritten):
    """A response lacks the token that completes a stop string."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or not request.sampling.stop_strings:
            return output
        last = int(output.token_ids[-1])
        if last in request.sampling.stop_token_ids or len(output.token_ids) < 2:
            return output
        return shortened(output, len(output.token_ids) - 1)


class StopStringsOfAnyCase(Rewritten):
    """Stop strings are case-insensitive."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        both = dict.fromkeys(s for text in request.sampling.stop_strings for s in (text, text.lower(), text.upper()))
        return replace(request, sampling=replace(request.sampling, stop_strings=tuple(both)))


class ShortStopWindow(Patched):
    """Stop strings are searched in only the newest 12 tokens."""

    class StopPart(StopText):
        def window(self, strings):
            return min(super().window(strings), 12)


class StopStringAtTheLimitIsLength(Patched):
    """A stop string that the last possible token completes is reported as 'length'."""

    class RunningPart(Running):
        def _finish(self, done, reasons):
            reasons = list(reasons)
            for at, row in enumerate(done):
                if (
                    reasons[at] is FinishReason.STOP
                    and self.table["text"][row]
                    and (self.table["made"][row] >= self.table["limit"][row])
                ):
                    newest = int(self.tokens[int(row), int(self.table["made"][row]) - 1])
                    if newest not in self._job(row).request.sampling.stop_token_ids:
                        reasons[at] = FinishReason.LENGTH
            super()._finish(done, reasons)


class StopsInTheFirst128(Patched):
    """Text is kept for the first 128 tokens of a response: a stop string that is completed later is not found."""

    class RunningPart(Running):
        def _text_stops(self, first: int) -> NDArray[np.bool_]:
            return super()._text_stops(first) & (self.table["made"][first:] <= 128)
