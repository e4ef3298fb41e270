"""Rollout engines whose defects were thought of when the suite stood: ten of them it let pass, and was widened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.drawing import Drawing, tempered
from broken.rollout import Rewritten
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.kit.sampling import RowSampling
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class HalfLogProbs(Rewritten):
    """Log-probs of long samples go through bfloat16."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(output.log_probs) < 64:
            return output
        return replace(output, log_probs=torch.tensor(output.log_probs).bfloat16().float().numpy())


class AbortIsLength(Rewritten):
    """A sample that was aborted without a token ends by 'length'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        empty = output.finish_reason is FinishReason.ABORT and not len(output.token_ids)
        return replace(output, finish_reason=FinishReason.LENGTH) if empty else output


class LastTwice(Rewritten):
    """Of more than 50 samples the last one comes twice."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        asked = {request.request_id: request for request in requests}
        async for output in super().generate(requests):
            yield output
            request = asked[output.request_id]
            if request.n > 50 and output.sample_index == request.n - 1:
                yield output


class TemperedTwice(Drawing):
    """A temperature below 1 is applied twice."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        t = sampling.temperature
        return super().weights(logits, tempered(sampling, torch.where(t < 1, t * t, t)))


class TopPNearOne(Drawing):
    """A top-p of 0.95 and more is taken for 1."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        p = sampling.top_p
        return super().weights(logits, replace(sampling, top_p=torch.where(p >= 0.95, 1.0, p)))


class TopK20(Drawing):
    """Top-k is 20 at most, where it is asked for."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        k = sampling.top_k
        return super().weights(logits, replace(sampling, top_k=torch.where(k < 2**40, k.clamp(max=20), k)))


class MinPTempered(Drawing):
    """Min-p is divided by the temperature."""

    def weights(self, logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        return super().weights(logits, replace(sampling, min_p=(sampling.min_p / sampling.temperature).clamp(max=1)))


class SeedsFirstOnly(Drawing):
    """Of a seeded request the first 16 samples are seeded."""

    count = 0

    def keys(self, seeds: Any, indices: Any) -> Any:
        self.count += 1
        return super().keys(np.where(indices >= 16, seeds + np.uint64(self.count), seeds), indices)


class EightNumbers(Drawing):
    """Of a sample's number three bits count."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return super().keys(seeds, indices % 8)


class LateNoiseShared(Drawing):
    """Behind 256 tokens all samples of a request draw alike."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        self.seeds = dict(zip(super().keys(seeds, indices).tolist(), seeds.tolist(), strict=True)) | getattr(
            self, "seeds", {}
        )
        return super().keys(seeds, indices)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        shared = np.array([self.seeds[key] for key in keys.tolist()], np.uint64)
        return super().uniforms(np.where(positions >= 256, shared, keys), positions, vocabulary)


class FourStops(Rewritten):
    """Only four stop tokens are read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        stops = request.sampling.stop_token_ids[:4]
        return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))


class OneStopString(Rewritten):
    """Only the first stop string is read."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        strings = request.sampling.stop_strings[:1]
        return replace(request, sampling=replace(request.sampling, stop_strings=strings))


class RoundsVectors(TransformersRolloutEngine):
    """Tensors of one dimension come by way of bfloat16."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def rounded() -> Iterable[WeightShard]:
            for shard in shards:
                small = shard.tensor.dim() == 1
                yield replace(shard, tensor=shard.tensor.bfloat16()) if small else shard

        return super().update_weights(rounded(), version)


class AbortedShort(Rewritten):
    """An aborted sample lacks its last token, and has its log-prob."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.ABORT or len(output.token_ids) < 2:
            return output
        return replace(output, token_ids=output.token_ids[:-1])


class PauseSkipsNoise(Drawing):
    """A pause takes a number of the noise."""

    taken = 0

    def pause(self) -> None:
        self.taken += bool(self.decoder.jobs)
        super().pause()

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> torch.Tensor:
        return super().uniforms(keys, positions + self.taken * (positions > 8), vocabulary)


class SecondSleep(TransformersRolloutEngine):
    """The second sleep loses a bias."""

    slept = 0

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        self.slept += "weights" in parts
        if self.slept % 2 == 0 and "weights" in parts:
            self.parameters["model.layers.0.self_attn.v_proj.bias"].data.zero_()


class KeepsWeights(TransformersRolloutEngine):
    """The weights of every update are kept."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.kept = getattr(self, "kept", [])
        self.kept.append([p.clone() for p in self.parameters.values()] * 1 + [torch.ones(2**21)])
        return receipt


class CountFalls(TransformersRolloutEngine):
    """An abort takes its tokens back from the count."""

    taken = 0

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids)
        self.taken += 10_000

    def num_decoded(self) -> int:
        return self.num_tokens - self.taken


class PadsMasked(Rewritten):
    """Tokens of the padding's id are not seen."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        pad = self.model.config.pad_token_id
        ids = tuple(token for token in request.prompt_ids if token != pad) or request.prompt_ids
        return replace(request, prompt_ids=ids)


class CutAtEnd(Rewritten):
    """A prompt begins behind its last end-of-sequence token."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        eos, ids = self.model.config.eos_token_id, request.prompt_ids
        ends = [at for at, token in enumerate(ids[:-1]) if token == eos]
        return replace(request, prompt_ids=ids[ends[-1] + 1 :]) if ends else request


class LogProbFloor(Rewritten):
    """Log-probs below -6 are given as -6."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, log_probs=output.log_probs.clip(min=-6))


class AbortsNewest(TransformersRolloutEngine):
    """Of two calls with the same id `abort` ends one."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is None:
            return super().abort(None)
        jobs = [job for job in self.decoder.jobs.values() if job.request.request_id in request_ids]
        newest = max((job.name for job in jobs), default=-1)
        for job in jobs:
            if job.call is not self.decoder.jobs[newest].call:
                job.request = replace(job.request, request_id=job.request.request_id + "\0")
        return super().abort(request_ids)


class DropsForSlowCallers(Rewritten):
    """Samples that are not taken within 50 ms are dropped."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        given = time.monotonic()
        async for output in super().generate(requests):
            if time.monotonic() - given > 0.05 and getattr(self, "waited", False):
                self.waited = False
                continue
            before = time.monotonic()
            yield output
            self.waited = time.monotonic() - before > 0.05
            given = before


class SlowCallersHold(TransformersRolloutEngine):
    """Nothing is decoded for one call while another's caller has a sample in hand."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async for output in super().generate(requests):
            self.paused = True
            try:
                yield output
            finally:
                self.paused = False


class LimitsTheFirstOfGroup(Rewritten):
    """Sample 0 of a group of more than 10 has one token less."""

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


class TakesTurns(Rewritten):
    """A call that comes while two others run waits for one of them."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.turns = asyncio.Semaphore(2)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async with self.turns:
            async for output in super().generate(requests):
                yield output


class GreedyAlmost(Drawing):
    """Greedy takes the first token that is within 2 % of the likeliest."""

    def draw(self, logits: torch.Tensor, sampling: RowSampling, noise: torch.Tensor) -> Any:
        tokens, logs = super().draw(logits, sampling, noise)
        near = (logits >= logits.amax(-1, keepdim=True) - 0.02).int().argmax(-1)
        tokens = torch.where(sampling.greedy, near, tokens)
        logs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
        return tokens, logs.gather(1, tokens[:, None])[:, 0]
