"""Rollout engines that are right about one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.drawing import Drawing
from broken.lengths import shortened
from broken.rollout import BeforeTemperature, Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.kit.sampling import RowSampling
from rlsdk.kit.stop_text import StopText
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class FirstOnesTemperature(Rewritten):
    """A call has one temperature: that of its first request that is not greedy."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        warm = [request.sampling.temperature for request in requests if request.sampling.temperature]
        same = [
            replace(request, sampling=replace(request.sampling, temperature=warm[0]))
            if request.sampling.temperature
            else request
            for request in requests
        ]
        async for output in super().generate(same):
            yield output


class GreedyInCompany(Drawing):
    """Greedy rows are drawn where others in the batch are."""

    def draw(self, logits: torch.Tensor, sampling: RowSampling, noise: torch.Tensor) -> Any:
        if 0 < sampling.num_greedy < len(logits):
            sampling = replace(sampling, greedy=torch.zeros_like(sampling.greedy))
        return super().draw(logits, sampling, noise)


class FiltersOfNeighbour(Drawing):
    """Where some rows of a batch have no top-p, the others lose theirs."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        if bool((sampling.top_p >= 1).any()):
            sampling = replace(sampling, top_p=torch.ones_like(sampling.top_p))
        return super().weights(logits, sampling)


class StopsOfOthers(Rewritten):
    """A stop token of one request stops all of its call."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        every = tuple({token for request in requests for token in request.sampling.stop_token_ids})
        async for output in super().generate(
            [replace(request, sampling=replace(request.sampling, stop_token_ids=every)) for request in requests]
        ):
            yield output


class FirstNeverStops(Rewritten):
    """A stop token that comes as the first does not stop."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        stops = set(request.sampling.stop_token_ids)
        ends = [at for at, token in enumerate(output.token_ids.tolist()) if at and token in stops]
        if not ends or output.finish_reason is FinishReason.ABORT:
            return output
        return shortened(output, ends[0] + 1, finish_reason=FinishReason.STOP)


class LengthBeforeStop(Rewritten):
    """A stop token at the limit is said to be the limit's end."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        full = len(output.token_ids) + len(request.response_ids) == request.sampling.max_tokens
        return replace(output, finish_reason=FinishReason.LENGTH) if full else output


class StopsByPrompt(Rewritten):
    """Stop strings are looked for in the prompt's end, too."""

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
    """A stop string is found where one token holds it."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        short = tuple(string for string in request.sampling.stop_strings if len(string) == 1)
        return replace(request, sampling=replace(request.sampling, stop_strings=short))


class SameAgainFrom32(Rewritten):
    """Sample 32 + i of a request is sample i again."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        asked = {request.request_id: request for request in requests}
        fewer = [replace(request, n=min(request.n, 32)) for request in requests]
        async for output in super().generate(fewer):
            yield output
            request = asked[output.request_id]
            for index in range(output.sample_index + 32, request.first_sample + request.n, 32):
                yield replace(output, sample_index=index)


class PromptsMerged(Rewritten):
    """Requests of a call with the same prompt and settings get the same samples, whatever their seeds."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        seeds: dict[Any, int | None] = {}
        merged = []
        for at, request in enumerate(requests):
            seed = request.sampling.seed
            own = at if seed is None else seed
            key = request.prompt_ids, replace(request.sampling, seed=None), request.response_ids
            merged.append(replace(request, sampling=replace(request.sampling, seed=seeds.setdefault(key, own))))
        async for output in super().generate(merged):
            yield output


class NamesRunTogether(Rewritten):
    """Samples are kept under the id and the index, with nothing between."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        known: dict[str, tuple[str, int]] = {}
        for request in requests:
            for index in range(request.first_sample, request.first_sample + request.n):
                known[f"{request.request_id}{index}"] = (request.request_id, index)
        async for output in super().generate(requests):
            name, index = known[f"{output.request_id}{output.sample_index}"]
            yield replace(output, request_id=name, sample_index=index)


class AllAtTheEnd(Rewritten):
    """Samples are given out when the last one has ended."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        outputs = [output async for output in super().generate(requests)]
        for output in sorted(outputs, key=lambda output: -len(output.token_ids)):
            yield output


class OneBuffer(Rewritten):
    """All samples are views of one buffer."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.ids, self.logs = np.zeros(spec.max_model_tokens, np.int64), np.zeros(spec.max_model_tokens, np.float32)

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        length = len(output.token_ids)
        self.ids[:length], self.logs[:length] = output.token_ids, output.log_probs
        return replace(output, token_ids=self.ids[:length], log_probs=self.logs[:length])


class NoGradient(Rewritten):
    """Gradients are off while `generate` waits for its caller."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        with torch.no_grad():
            async for output in super().generate(requests):
                yield output


class NothingFails(Rewritten):
    """A call without requests is an error."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        longest = max(len(request.prompt_ids) for request in requests)
        assert longest
        async for output in super().generate(requests):
            yield output


class AlikeReplicas(TransformersRolloutEngine):
    """Replicas do not mix their rank into their noise."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(replace(ctx, rank=0), spec)


class OneModelForAll(TransformersRolloutEngine):
    """Engines of a process share one model."""

    living: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        for other in self.living[:1]:
            for name, parameter in self.parameters.items():
                parameter.data = other.parameters[name].data
        self.living.append(self)

    def close(self) -> None:
        if self in self.living:
            self.living.remove(self)
        super().close()


class NoiseOfTheClock(Drawing):
    """Noise is that of the engine's step: what joins later draws other tokens."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        later = int(len(self.decoder.jobs) > 3 and max(job.name for job in self.decoder.jobs.values()) % 2)
        return super().uniforms(keys + np.uint64(later), positions, vocabulary)


class JoinsWithoutFirst(Rewritten):
    """What joins a running batch is sampled as the first request of that batch asks."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.current: list[float] = []

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        joined = [
            replace(request, sampling=replace(request.sampling, temperature=self.current[0]))
            if self.current and request.sampling.temperature
            else request
            for request in requests
        ]
        warm = [request.sampling.temperature for request in joined if request.sampling.temperature][:1]
        self.current += warm
        try:
            async for output in super().generate(joined):
                yield output
        finally:
            for temperature in warm:
                self.current.remove(temperature)


class LimitOfBatch(Rewritten):
    """Samples of more than one kind of limit run to the longest, and are cut without their last token."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        await asyncio.sleep(0)
        mixed = len({request.sampling.max_tokens for request in requests}) > 8
        async for output in super().generate(requests):
            full = output.finish_reason is FinishReason.LENGTH and len(output.token_ids) > 30
            yield shortened(output, len(output.token_ids) - 1) if mixed and full else output


class RareLogProbs(BeforeTemperature):
    """In a call of greedy and warm requests the greedy ones' log-probs are 0."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        asked = {request.request_id: request.sampling.temperature for request in requests}
        mixed = len({bool(temperature) for temperature in asked.values()}) == 2
        async for output in super().generate(requests):
            greedy = mixed and not asked[output.request_id]
            yield replace(output, log_probs=np.zeros_like(output.log_probs)) if greedy else output
