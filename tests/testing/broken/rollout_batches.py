"""Rollout engines whose samples depend on, or are mixed up with, others in the batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest
from rlsdk.kit.generation.sampling import RowSampling
from rlsdk.reference.running import Running


class RowsSwapped(Rewritten):
    """If there are more samples than slots, two requests get each other's samples."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        crowded = sum(request.n for request in requests) > self.spec.max_running and len(requests) > 4
        names = (
            {requests[0].request_id: requests[1].request_id, requests[1].request_id: requests[0].request_id}
            if (crowded)
            else {}
        )
        async for output in super().generate(requests):
            yield replace(output, request_id=names.get(output.request_id, output.request_id))


class OneSampleTwice(Rewritten):
    """For a request of five samples, the first is returned twice and the last is missing."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, sample_index=0) if request.n == 5 and output.sample_index == 4 else output


class TopKOfBatch(Drawing):
    """Every row gets the largest top-k of its batch."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, replace(sampling, top_k=sampling.top_k.amax().expand(len(logits))))


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


class FiltersOfNeighbour(Drawing):
    """If some rows of a batch have no top-p, the other rows lose theirs."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        if bool((sampling.top_p >= 1).any()):
            sampling = replace(sampling, top_p=torch.ones_like(sampling.top_p))
        return super().weights(logits, sampling)


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


class LastTwice(Rewritten):
    """With more than 50 samples, the last one is returned twice."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        asked = {request.request_id: request for request in requests}
        async for output in super().generate(requests):
            yield output
            request = asked[output.request_id]
            if request.n > 50 and output.sample_index == request.n - 1:
                yield output


class MajorityIsGreedy(Patched):
    """If most rows of a step are greedy, all of them take the most probable token."""

    class RunningPart(Running):
        def _sampling_of(self, rows):
            found = super()._sampling_of(rows)
            most = 2 * found.num_greedy > len(rows) > 1
            return replace(found, greedy=torch.ones_like(found.greedy)) if most else found


class NarrowIds(Rewritten):
    """Token ids are 16-bit integers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, token_ids=output.token_ids.astype(np.int16))
