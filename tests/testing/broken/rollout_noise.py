"""Rollout engines whose seeds or random numbers are wrong: repeated, correlated, or dependent on what they must not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broken.defect import defect
from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.kit.generation import sampling as right
from rlsdk.kit.generation.sampling import mixed_seed, splitmix64
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect(
    {
        "seed": "samples that changed among others",
        "abort": "not the beginning of what they would have been",
        "pause": "samples that a pause changed",
        "first_sample": "differ from the group's",
        "continue.seed": "an interruption changed",
    }
)
class SeedIgnored(Rewritten):
    """Every call gives new samples, seeded or not."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, seed=None))


@defect({"no_seed": "samples that came again"})
class SeedForAll(Rewritten):
    """Without a seed, every call draws the same samples."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        return replace(request, sampling=replace(request.sampling, seed=0 if seed is None else seed))


@defect({"first_sample": "differ from the group's", "continue.seed": "changed"})
class GroupNumbered(Rewritten):
    """`first_sample` changes only the number: the random numbers are those of the position in the request."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, first_sample=0)

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, sample_index=request.first_sample + output.sample_index)


@defect({"distribution.rare_tokens": "p-value"})
class CoarseNoise(Drawing):
    """Random numbers have 8 bits."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return (super().uniforms(keys, positions, vocabulary) * 256).floor() / 256


@defect({"distribution.rare_tokens": "p-value"})
class HalfNoise(Drawing):
    """Random numbers are rounded to bfloat16."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions, vocabulary).bfloat16().float().clamp(max=0.996)


@defect({"independent_draws": "1 steps apart", "independent_draws.seeds": "steps apart"})
class NoiseTwice(Drawing):
    """Every random number is used for two steps."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions // 2, vocabulary)


@defect({"length.responses": "128 steps apart"})
class NoiseInARing(Drawing):
    """Random numbers repeat after 128 tokens."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(keys, positions % 128, vocabulary)


@defect({"independent_draws": "steps apart", "independent_draws.seeds": "steps apart"})
class NoiseMovesOn(Drawing):
    """A sample uses its neighbour's random number of the previous step: index and position are added."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return seeds * np.uint64(2**20) + indices.astype(np.uint64)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return super().uniforms(splitmix64(keys + positions.astype(np.uint64)), positions * 0, vocabulary)


@defect({"independent_draws": "samples", "batch_invariance.many_samples": "distinct samples"})
class SamplesInPairs(Drawing):
    """Samples 2 and 3, 4 and 5, ... of a request have the same random numbers."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, np.where(indices > 1, indices // 2 + 1000, indices))


@defect({"independent_draws.seeds": "depend on others", "seed.values": "the same tokens"})
class SeedPlusIndex(Drawing):
    """Sample i of seed s is sample 0 of seed s + i."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds + indices.astype(np.uint64), indices * 0)


@defect({"seed.values": "did not come again"})
class SeedZero(Drawing):
    """A seed of 0 is treated as no seed."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, seed=request.sampling.seed or None))


@defect({"replicas": "another replica's"})
class ReplicasShareNoise(TransformersRolloutEngine):
    """Replicas do not include their rank in their random numbers."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(replace(ctx, rank=0), spec)


@defect({"batch_invariance.seeded": "other requests changed"})
class NoiseOfTheStep(Drawing):
    """Random numbers depend on the engine's step: requests that join later draw other tokens."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        later = int(len(self.decoder.jobs) > 3 and max(job.name for job in self.decoder.jobs.values()) % 2)
        return super().uniforms(keys + np.uint64(later), positions, vocabulary)


@defect({"independent_draws.lifetime": "distinct samples"})
class SleepBeginsNoise(TransformersRolloutEngine):
    """Random numbers without a seed start again when the engine wakes."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        self.num_calls = 0


@defect({"independent_draws.lifetime": "distinct samples"})
class UpdateBeginsNoise(TransformersRolloutEngine):
    """Random numbers without a seed start again with every version."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.num_calls = 0
        return receipt


@defect({"batch_invariance.seeded": "other requests changed"})
class SeedsFirstOnly(Drawing):
    """Only the first 16 samples of a seeded request are seeded."""

    count = 0

    def keys(self, seeds: Any, indices: Any) -> Any:
        self.count += 1
        return super().keys(np.where(indices >= 16, seeds + np.uint64(self.count), seeds), indices)


@defect({"batch_invariance.many_samples": "distinct samples"})
class EightNumbers(Drawing):
    """Only three bits of a sample's number are used."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return super().keys(seeds, indices % 8)


@defect({"independent_draws.lifetime": "distinct samples"})
class WakeBeginsCalls(Patched):
    """The count of calls starts again at 0 when the engine wakes."""

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "kv_cache" in parts:
            self.num_calls = 0


@defect({"pause.same_weights": "samples that it changed"})
class VersionInSeed(Drawing):
    """Samples of a seed depend on the number of the version."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return right.uniforms(keys ^ np.uint64(self.version << 8), positions, vocabulary)


@defect({"seed.values": "samples of one seed"})
class IndexOfAThousand(Drawing):
    """Sample 1000 + i of a seed equals sample i."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, indices % 1000)


@defect({"seed.alone": "with what does not count"})
class SeedMixesMaxTokens(Patched):
    """Samples of a seed depend on `max_tokens`."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is not None:
            job.seed = mixed_seed(request.sampling.seed, request.sampling.max_tokens)
        return job


@defect({"random_state": "generators that were moved on"})
class GlobalGenerator(Patched):
    """Seeds of requests without a seed come from torch's global generator."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = int(torch.randint(2**62, ()))
        return job
