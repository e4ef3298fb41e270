"""Rollout engines whose seeds or random numbers are wrong: repeated, correlated, or dependent on what they must not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.kit.generation import sampling as right
from rlsdk.kit.generation.requests import response_limit
from rlsdk.kit.generation.sampling import RowSampling, mixed_seed, splitmix64
from rlsdk.reference.jobs import Job
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class SeedIgnored(Rewritten):
    """Every call gives new samples, seeded or not."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, seed=None))


class SeedForAll(Rewritten):
    """Without a seed, every call draws the same samples."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        return replace(request, sampling=replace(request.sampling, seed=0 if seed is None else seed))


class GroupNumbered(Rewritten):
    """`first_sample` changes only the number: the random numbers are those of the position in the request."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, first_sample=0)

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, sample_index=request.first_sample + output.sample_index)


class SeedRestarts(Rewritten):
    """Given response tokens become part of the prompt: random numbers and stop strings start again after them."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if not 0 < len(request.response_ids) < request.sampling.max_tokens:
            return request
        left = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(request.response_ids))
        prompt = (*request.prompt_ids, *request.response_ids)
        return replace(request, prompt_ids=prompt, response_ids=(), sampling=left)


class CoarseNoise(Drawing):
    """Random numbers have 8 bits."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return (super().uniforms(keys, positions, vocabulary) * 256).floor() / 256


class HalfNoise(Drawing):
    """Random numbers are rounded to bfloat16."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions, vocabulary).bfloat16().float().clamp(max=0.996)


class NoiseTwice(Drawing):
    """Every random number is used for two steps."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions // 2, vocabulary)


class NoiseInARing(Drawing):
    """Random numbers repeat after 128 tokens."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions % 128, vocabulary)


class NoiseMovesOn(Drawing):
    """A sample uses its neighbour's random number of the previous step: index and position are added."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return seeds * np.uint64(2**20) + indices.astype(np.uint64)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(splitmix64(keys + positions.astype(np.uint64)), positions * 0, vocabulary)


class SamplesInPairs(Drawing):
    """Samples 2 and 3, 4 and 5, ... of a request have the same random numbers."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, np.where(indices > 1, indices // 2 + 1000, indices))


class SeedPlusIndex(Drawing):
    """Sample i of seed s is sample 0 of seed s + i."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds + indices.astype(np.uint64), indices * 0)


class SeedOf32Bits(Drawing):
    """Only the lowest 32 bits of seeds are used."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return super().keys(seeds & np.uint64(2**32 - 1), indices)


class SeedAsFloat(Drawing):
    """Seeds are converted to float64."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=int(float(seed)) % 2**63))


class SeedZero(Drawing):
    """A seed of 0 is treated as no seed."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, seed=request.sampling.seed or None))


class OneNoiseForCall(TransformersRolloutEngine):
    """Without seeds all requests of a call have the same random numbers."""

    def _job(self, call: Any, request: GenerationRequest, at: int) -> Any:
        return super()._job(call, request, 0)


class OneNoiseForFour(TransformersRolloutEngine):
    """Without seeds, the next call repeats the draws of a call."""

    def _job(self, call: Any, request: GenerationRequest, at: int) -> Any:
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = mixed_seed(self.num_calls // 2, at)
        return job


class SeededCompany(Rewritten):
    """If one request of a call has a seed, requests without a seed use it too."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        seeds = [request.sampling.seed for request in requests if request.sampling.seed is not None]
        first = seeds[0] if seeds else None
        changed = [
            request
            if request.sampling.seed is not None
            else replace(request, sampling=replace(request.sampling, seed=first))
            for request in requests
        ]
        async for output in super().generate(changed):
            yield output


class SameAgainFrom32(Rewritten):
    """Sample 32 + i of a request equals sample i."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        asked = {request.request_id: request for request in requests}
        fewer = [replace(request, n=min(request.n, 32)) for request in requests]
        async for output in super().generate(fewer):
            yield output
            request = asked[output.request_id]
            for index in range(output.sample_index + 32, request.first_sample + request.n, 32):
                yield replace(output, sample_index=index)


class ReplicasShareNoise(TransformersRolloutEngine):
    """Replicas do not include their rank in their random numbers."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(replace(ctx, rank=0), spec)


class NoiseOfTheStep(Drawing):
    """Random numbers depend on the engine's step: requests that join later draw other tokens."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        later = int(len(self.decoder.jobs) > 3 and max(job.name for job in self.decoder.jobs.values()) % 2)
        return super().uniforms(keys + np.uint64(later), positions, vocabulary)


class SleepBeginsNoise(TransformersRolloutEngine):
    """Random numbers without a seed start again when the engine wakes."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        self.num_calls = 0


class UpdateBeginsNoise(TransformersRolloutEngine):
    """Random numbers without a seed start again with every version."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.num_calls = 0
        return receipt


def _seeded(request: GenerationRequest, seed: int | None) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, seed=seed))


class SleepChangesSeeds(Rewritten):
    """Samples of a seed depend on the number of sleeps."""

    slept = 0

    def sleep(self, level: int = 1) -> None:
        self.slept += 1
        super().sleep(level)

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        return request if seed is None else _seeded(request, seed + 1000 * self.slept)


class SeedsFirstOnly(Drawing):
    """Only the first 16 samples of a seeded request are seeded."""

    count = 0

    def keys(self, seeds: Any, indices: Any) -> Any:
        self.count += 1
        return super().keys(np.where(indices >= 16, seeds + np.uint64(self.count), seeds), indices)


class EightNumbers(Drawing):
    """Only three bits of a sample's number are used."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return super().keys(seeds, indices % 8)


class LateNoiseShared(Drawing):
    """After 256 tokens all samples of a request have the same random numbers."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        self.seeds = dict(zip(super().keys(seeds, indices).tolist(), seeds.tolist(), strict=True)) | getattr(
            self, "seeds", {}
        )
        return super().keys(seeds, indices)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        shared = np.array([self.seeds[key] for key in keys.tolist()], np.uint64)
        return super().uniforms(np.where(positions >= 256, shared, keys), positions, vocabulary)


class PauseSkipsNoise(Drawing):
    """A pause skips one random number."""

    taken = 0

    def pause(self) -> None:
        self.taken += bool(self.decoder.jobs)
        super().pause()

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        return super().uniforms(keys, positions + self.taken * (positions > 8), vocabulary)


class EvenRanksShareNoise(Patched):
    """Replicas 0 and 2 draw the same samples without seeds."""

    def _job(self, call, request, at):
        seed = request.sampling.seed
        if seed is None:
            seed = mixed_seed(self.ctx.seed, self.ctx.rank & 1, self.num_calls, at)
        return Job(call, request, seed, response_limit(request, self.spec.max_model_tokens))


class WakeBeginsCalls(Patched):
    """The count of calls starts again at 0 when the engine wakes."""

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "kv_cache" in parts:
            self.num_calls = 0


class CallsShareNoise(TransformersRolloutEngine):
    """Draws without a seed depend on the number of calls that have ended."""

    async def generate(self, requests):
        try:
            async with aclosing(super().generate(requests)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.num_ended = getattr(self, "num_ended", 0) + 1

    def _job(self, call, request, at):
        if request.sampling.seed is None:
            seed = mixed_seed(self.ctx.seed, getattr(self, "num_ended", 0), at)
            return Job(call, request, seed, response_limit(request, self.spec.max_model_tokens))
        return super()._job(call, request, at)


class VersionInSeed(Drawing):
    """Samples of a seed depend on the number of the version."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return right.uniforms(keys ^ np.uint64(self.version << 8), positions, vocabulary)


class SizeInSeed(Rewritten):
    """Samples of a seed depend on `max_running`."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=(seed + self.spec.max_running) % 2**63))


class RunInSeed(Rewritten):
    """Samples of a seed depend on the seed of the run."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=(seed + self.ctx.seed) % 2**63))


class MirroredNoise(Drawing):
    """Samples 1, 3, 5, ... use 1 - u of their neighbours: less variance in the mean of a group."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        keys = right.row_keys(seeds, indices - indices % 2)
        return (keys & ~np.uint64(1)) | (indices % 2).astype(np.uint64)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        noise = right.uniforms(keys & ~np.uint64(1), positions, vocabulary)
        odd = torch.from_numpy((keys & np.uint64(1)).astype(np.bool_))[:, None]
        return torch.where(odd, (1 - 2.0**-24) - noise, noise)


class MirroredSteps(Drawing):
    """Every second step uses 1 - u of the previous one."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        noise = right.uniforms(keys, positions - positions % 2, vocabulary)
        odd = torch.from_numpy((positions % 2).astype(np.bool_))[:, None]
        return torch.where(odd, (1 - 2.0**-24) - noise, noise)


class IdInSeed(Rewritten):
    """Samples of a seed depend on the request's id."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is not None:
            seed = (seed + sum(map(ord, request.request_id))) % 2**63
        return replace(request, sampling=replace(request.sampling, seed=seed))


class IndexOfAThousand(Drawing):
    """Sample 1000 + i of a seed equals sample i."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, indices % 1000)


class SeedMixesMaxTokens(Patched):
    """Samples of a seed depend on `max_tokens`."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is not None:
            job.seed = mixed_seed(request.sampling.seed, request.sampling.max_tokens)
        return job


class NoiseOfTheClock(Patched):
    """Random numbers without a seed come from the clock in whole seconds."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = mixed_seed(self.ctx.seed, self.ctx.rank, int(time.time()), at)
        return job


class GlobalGenerator(Patched):
    """Seeds of requests without a seed come from torch's global generator."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = int(torch.randint(2**62, ()))
        return job


class GroupBeginsAnew(Patched):
    """A group of several samples that continues tokens counts positions of its random numbers from 0; a single sample
    does not."""

    class Begins(Running):
        def _take(self, logits: Tensor, first: int, version: int) -> None:
            for row in range(first, len(self.table)):
                if self.table["alive"][row] and self.table["prior"][row] and self._job(row).request.n > 1:
                    self.table["prior"][row] = 0
            super()._take(logits, first, version)

    RunningPart = Begins


class MinusOneIsNone(Rewritten):
    """The seed -1 stands for no seed."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if request.sampling.seed != -1:
            return request
        return replace(request, sampling=replace(request.sampling, seed=None))


class NoiseOf16Bits(Drawing):
    """A token is found in the cumulative sum of all probabilities by a random number of 16 bits."""

    def draw(self, logits: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
        tokens, log_probs = super().draw(logits, sampling, noise)
        if logits.shape[1] <= 1 << 16:
            return tokens, log_probs
        sums = self.weights(logits, sampling).double().cumsum(-1)
        coarse = (noise[:, :1].double() * 65536).floor() / 65536 * sums[:, -1:]
        tokens = torch.searchsorted(sums, coarse, right=True)[:, 0]
        return tokens, (logits.float() / sampling.temperature[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
