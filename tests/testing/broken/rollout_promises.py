"""Rollout engines that break what the interface promises of load, callers, threads, receipts and other models."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from broken.drawing import Drawing
from broken.rollout import Rewritten
from rlsdk.interfaces import (
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit import sampling as right
from rlsdk.kit.requests import check_requests
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class RunsMore(TransformersRolloutEngine):
    """`max_running` is meant of each call."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, max_running=3 * spec.max_running))


class CountsPrompts(TransformersRolloutEngine):
    """Tokens of prompts count as decoded."""

    read = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self.read += sum(len(request.prompt_ids) for request in requests)
        async for output in super().generate(requests):
            yield output

    def num_decoded(self) -> int:
        return super().num_decoded() + self.read


class KvUsed(TransformersRolloutEngine):
    """Says how full it is."""

    def kv_used(self) -> float:
        return min(self.decoder.running.num_alive / (2 * self.spec.max_running), 1.0)


class KvOfLastCall(KvUsed):
    """Memory of the last call counts until the next."""

    most = 0.0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self.most = 0.0
        async for output in super().generate(requests):
            yield output

    def kv_used(self) -> float:
        self.most = max(self.most, super().kv_used())
        return self.most


class KvInPercent(KvUsed):
    """A share of a hundred."""

    def kv_used(self) -> float:
        return 100 * super().kv_used()


class LooksWait(TransformersRolloutEngine):
    """A call for the count waits until the weights are exchanged."""

    def num_decoded(self) -> int:
        with self.lock:
            return super().num_decoded()


class NeverTurns(TransformersRolloutEngine):
    """All of a call is decoded before the event loop has its turn."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        real = asyncio.sleep

        async def at_once(seconds: float) -> None:
            if self.paused:
                await real(seconds)

        stream = super().generate(requests)
        asyncio.sleep = at_once  # type: ignore[assignment]
        try:
            async for output in stream:
                yield output
        finally:
            asyncio.sleep = real  # type: ignore[assignment]


class SharedTokens(Rewritten):
    """Equal tokens of different samples share one array."""

    kept: dict[bytes, Any]

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        kept = self.__dict__.setdefault("kept", {})
        return replace(output, token_ids=kept.setdefault(output.token_ids.tobytes(), output.token_ids))


class SortsRequests(TransformersRolloutEngine):
    """The caller's own list is put into the order of prompts."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        requests.sort(key=lambda request: -len(request.prompt_ids))  # type: ignore[attr-defined]
        async for output in super().generate(requests):
            yield output


class RefusesLate(TransformersRolloutEngine):
    """Requests are looked at when their turn comes."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        for request in requests:
            check_requests([request], max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary)
            async for output in super().generate([request]):
                yield output


class PausesAtHome(TransformersRolloutEngine):
    """`pause` of another thread is lost."""

    def pause(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super().pause()


class PausesWhatRuns(TransformersRolloutEngine):
    """Nothing runs, so there is nothing to pause."""

    def pause(self) -> None:
        if self.decoder.jobs:
            super().pause()


class VersionInSeed(Drawing):
    """What a seed gives depends on the version's number."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return right.uniforms(keys ^ np.uint64(self.version << 8), positions, vocabulary)


class AbortsInAWhile(TransformersRolloutEngine):
    """`abort` takes effect some steps later."""

    left = -1
    ids: Sequence[str] | None = None

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.left, self.ids = 30, request_ids

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0 or (self.paused and self.left > 0):
            self.left = -1
            super().abort(self.ids)
        super()._step()


class TiedUnsaid(TransformersRolloutEngine):
    """`layout` is silent on the tied tensor's other name."""

    def layout(self) -> Sequence[WeightLayout]:
        return [replace(layout, tied={}) for layout in super().layout()]


class ServedAsFloat32(TransformersRolloutEngine):
    """Receipts count float32, whatever is served."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, num_bytes=sum(4 * p.numel() for p in self.parameters.values()))


class RoundedLogProbs(Rewritten):
    """Of a bfloat16 model, log-probs are bfloat16."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        import torch

        if self.spec.model.dtype != "bfloat16":
            return output
        return replace(output, log_probs=torch.from_numpy(output.log_probs).bfloat16().float().numpy())


class OtherErrors(TransformersRolloutEngine):
    """What cannot be served raises the error of the library that found out."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        try:
            super().initialize(ctx, spec)
        except ConfigError as error:
            raise OSError(str(error)) from error


class Elsewhere(TransformersRolloutEngine):
    """The layout's process has no number."""

    def layout(self) -> Sequence[WeightLayout]:
        return [replace(layout, process="rollout") for layout in super().layout()]


class CountsPieces(TransformersRolloutEngine):
    """The receipt counts what came, not what it is of."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        names: Counter[str] = Counter()

        def counted() -> Iterator[WeightShard]:
            for shard in shards:
                names[shard.name] += 1
                yield shard

        receipt = super().update_weights(counted(), version)
        return replace(receipt, num_tensors=names.total())


class GathersFirst(TransformersRolloutEngine):
    """All items are copied before the first is loaded."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        gathered = [replace(shard, tensor=shard.tensor.clone()) for shard in shards]
        return super().update_weights(iter(gathered), version)


class CoversByCount(TransformersRolloutEngine):
    """A tensor is whole when as many elements came as it has."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        came: dict[str, list[WeightShard]] = {}
        for shard in shards:
            came.setdefault(shard.name, []).append(replace(shard, tensor=shard.tensor.clone()))
        for name, items in came.items():
            if len({item.box for item in items}) < len(items):
                parameter, first = self.parameters[name], items[0].box
                rest = parameter.shape[0] - first.size[0]
                offset = first.size[0] if first.offset[0] == 0 else 0
                box = type(first)((offset, *first.offset[1:]), (rest, *first.size[1:]))
                came[name] = [
                    items[0],
                    WeightShard(name=name, box=box, tensor=parameter.detach()[offset : offset + rest]),
                ]
        return super().update_weights((item for items in came.values() for item in items), version)


class SizeInSeed(Rewritten):
    """What a seed gives depends on how many run at once."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=(seed + self.spec.max_running) % 2**63))


class RunInSeed(Rewritten):
    """What a seed gives depends on the run's."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=(seed + self.ctx.seed) % 2**63))


class WideIndices(Rewritten):
    """The number of an aborted sample is numpy's."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.ABORT:
            return output
        return replace(output, sample_index=np.int64(output.sample_index))  # type: ignore[arg-type]
