"""Rollout engines that are right as long as nothing happens to them."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.rollout import Rewritten
from rlsdk.interfaces import Box, GenerationOutput, GenerationRequest, RlsdkError, SyncReceipt, WeightShard
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class NeverWithdraws(TransformersRolloutEngine):
    """A call that is left goes on, as soon as another one steps the engine."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.decoder.withdraw = lambda call: None  # type: ignore[method-assign]


class LeftTakesAll(TransformersRolloutEngine):
    """A call that is left aborts all others."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        whole = False
        try:
            async for output in super().generate(requests):
                yield output
            whole = True
        finally:
            if not whole and len(self.decoder.jobs):
                self.abort()


class SlotsLost(TransformersRolloutEngine):
    """Every abort loses a slot."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids)
        self.decoder.max_running = max(self.decoder.max_running - 1, 1)


class SlotsLeft(TransformersRolloutEngine):
    """A call that is left loses a slot."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        whole = False
        try:
            async for output in super().generate(requests):
                yield output
            whole = True
        finally:
            if not whole:
                self.decoder.max_running = max(self.decoder.max_running - 1, 1)


class AbortWaitsForResume(TransformersRolloutEngine):
    """What is aborted in a pause comes when it is over."""

    def _step(self) -> None:
        if not self.paused:
            super()._step()


class NothingIsAll(TransformersRolloutEngine):
    """An empty list of requests to abort means all of them."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids or None)


class AbortSpeaksOfNext(TransformersRolloutEngine):
    """An abort that finds nothing to end is kept for what comes."""

    pending = False

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.pending = self.pending or (request_ids is None and not self.decoder.jobs)
        super().abort(request_ids)

    def _step(self) -> None:
        if self.pending and self.decoder.jobs:
            self.pending = False
            super().abort()
        super()._step()


class WaitingStay(TransformersRolloutEngine):
    """`abort` ends what runs, and not what waits for a slot."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        running = {job.request.request_id for job in self.decoder.jobs.values() if job.started}
        super().abort([name for name in running if request_ids is None or name in request_ids])


class PauseLetsIn(TransformersRolloutEngine):
    """A call that begins in a pause is run."""

    def pause(self) -> None:
        super().pause()
        self.held = set(self.decoder.jobs)

    def _step(self) -> None:
        if self.paused and set(self.decoder.jobs) - self.held:
            self.paused = False
            try:
                super()._step()
            finally:
                self.paused = True
        else:
            super()._step()


class PauseCounts(TransformersRolloutEngine):
    """Pausing twice wants two `resume`; one that comes alone pauses the next."""

    depth = 0

    def pause(self) -> None:
        self.depth += 1
        super().pause()

    def resume(self) -> None:
        self.depth -= 1
        self.paused = self.depth != 0


class SleepForgetsVersion(TransformersRolloutEngine):
    """Awake again, the engine says version 0."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if self.parameters and all(p.numel() for p in self.parameters.values()) and "kv_cache" in parts:
            self.version = 0


class SleepLosesUpdate(TransformersRolloutEngine):
    """Level 1 reads the weights again from the model's folder."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.first = {name: parameter.clone() for name, parameter in self.parameters.items()}

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" in parts:
            for name, parameter in self.parameters.items():
                parameter.data.copy_(self.first[name])


class SleepBeginsNoise(TransformersRolloutEngine):
    """Noise without a seed begins again when the engine wakes."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        self.num_calls = 0


class UpdateBeginsNoise(TransformersRolloutEngine):
    """Noise without a seed begins again with every version."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.num_calls = 0
        return receipt


class SleepChangesSeeds(Rewritten):
    """What a seed gives depends on how often the engine slept."""

    slept = 0

    def sleep(self, level: int = 1) -> None:
        self.slept += 1
        super().sleep(level)

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        return request if seed is None else _seeded(request, seed + 1000 * self.slept)


def _seeded(request: GenerationRequest, seed: int | None) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, seed=seed))


class ThreadForUpdate(TransformersRolloutEngine):
    """Every update starts a thread that waits for ever."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.stop = getattr(self, "stop", None) or threading.Event()
        threading.Thread(target=self.stop.wait, args=(600,), daemon=True).start()
        return super().update_weights(shards, version)

    def close(self) -> None:
        if hasattr(self, "stop"):
            self.stop.set()
        super().close()


class FileForCall(Rewritten):
    """Every call leaves a file open."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.files: list[Any] = []

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115 - that is the defect
        return request

    def close(self) -> None:
        for file in getattr(self, "files", []):
            file.close()
        super().close()


class FileForEngine(TransformersRolloutEngine):
    """An engine leaves a file open."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.file = os.open(os.devnull, os.O_RDONLY)


class ThreadForEngine(TransformersRolloutEngine):
    """A thread of an engine outlives it."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        threading.Thread(target=threading.Event().wait, args=(120,), daemon=True).start()


class SourceErrorKept(TransformersRolloutEngine):
    """What a source raises ends the update early, and nobody hears of it."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def quiet() -> Iterator[WeightShard]:
            seen = set()
            with suppress(OSError):
                for shard in shards:
                    seen.add(shard.name)
                    yield shard
                return
            for name, parameter in self.parameters.items():
                if name not in seen:
                    yield WeightShard(name=name, box=Box.whole(tuple(parameter.shape)), tensor=parameter)

        return super().update_weights(quiet(), version)


class StuckBehindError(TransformersRolloutEngine):
    """An update that fails leaves a mark behind which every later one fails."""

    failed = False

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.failed:
            raise RlsdkError("an update is under way")
        try:
            return super().update_weights(shards, version)
        except OSError:
            self.failed = True
            raise


class ItemsListed(TransformersRolloutEngine):
    """Items are collected first and read afterwards."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.decoder.jobs and not self.paused:
            return super().update_weights(shards, version)
        return super().update_weights(iter(list(shards)), version)


class OneItemAhead(TransformersRolloutEngine):
    """The next item is asked for before the last one is read."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def ahead() -> Iterator[WeightShard]:
            last = None
            for shard in shards:
                if last is not None:
                    yield last
                last = shard
            if last is not None:
                yield last

        if self.decoder.jobs and not self.paused:
            return super().update_weights(shards, version)
        return super().update_weights(ahead(), version)


class Flattened(TransformersRolloutEngine):
    """Items are read as if their memory had no gaps."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def flat() -> Iterator[WeightShard]:
            for shard in shards:
                tensor = shard.tensor
                if not tensor.is_contiguous() and tuple(tensor.shape) == shard.box.size:
                    size, stride = tensor.shape, []
                    step = 1
                    for length in reversed(size):
                        stride.append(step)
                        step *= length
                    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
                    if step <= room:
                        tensor = tensor.as_strided(size, tuple(reversed(stride)))
                yield replace(shard, tensor=tensor)

        return super().update_weights(flat(), version)


class RowsOnly(TransformersRolloutEngine):
    """A piece that does not begin in the first column is written from the first on."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        moved: list[tuple[Any, Any]] = []

        def heard() -> Iterator[WeightShard]:
            for shard in shards:
                if len(shard.box.offset) == 2 and shard.box.offset[1]:
                    moved.append((shard, shard.tensor.clone()))
                yield shard

        receipt = super().update_weights(heard(), version)
        for shard, values in moved:
            row = shard.box.offset[0]
            self.parameters[shard.name].data[row : row + values.shape[0], : values.shape[1]] = values
        return receipt


class ThroughHalf(TransformersRolloutEngine):
    """Weights of float64 come by way of float16."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return super().update_weights(
            (
                replace(shard, tensor=shard.tensor.half()) if shard.tensor.dtype is torch.float64 else shard
                for shard in shards
            ),
            version,
        )


class NaNsHidden(TransformersRolloutEngine):
    """NaN becomes 0, and samples are made of it."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return super().update_weights(
            (replace(shard, tensor=torch.nan_to_num(shard.tensor.float())) for shard in shards), version
        )


class NaNsGiven(TransformersRolloutEngine):
    """Samples of logits that are NaN are given out, their log-probs 0."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)

        class Hiding(Running):
            def _finish(self, done: Any, reasons: Any) -> None:
                self.log_probs = torch.nan_to_num(self.log_probs)
                super()._finish(done, reasons)

        self.decoder.running.__class__ = Hiding


class NaNsStay(TransformersRolloutEngine):
    """Weights that are not finite leave a bias behind that no update takes away."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        bias = self.parameters["model.layers.0.self_attn.v_proj.bias"]
        self.spoiled = getattr(self, "spoiled", False) or not all(
            bool(parameter.isfinite().all()) for parameter in self.parameters.values()
        )
        if self.spoiled:
            bias.data += 0.5
        return receipt


class SameVersionSkipped(TransformersRolloutEngine):
    """An update to the version that is served is taken for one that was done."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        kept = {name: p.clone() for name, p in self.parameters.items()} if version == self.version else {}
        receipt = super().update_weights(shards, version)
        for name, old in kept.items():
            self.parameters[name].data.copy_(old)
        return receipt


class VersionsOnlyGrow(TransformersRolloutEngine):
    """A version below the one that is served is not noted."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        old = self.version
        receipt = super().update_weights(shards, version)
        self.version = max(version, old) if version else version
        return receipt


class VersionOf32Bits(TransformersRolloutEngine):
    """Versions are kept in 32 bits."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return replace(super().update_weights(shards, version % 2**32), version=version)


class GreedyRemembered(Rewritten):
    """What greedy requests gave is remembered over updates."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.remembered: dict[Any, GenerationOutput] = {}

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature or len(request.prompt_ids) < 12:
            return output
        old = self.remembered.setdefault((request.prompt_ids, request.sampling, request.response_ids), output)
        return replace(old, versions=output.versions, sample_index=output.sample_index)


class LongRemembered(Rewritten):
    """Log-probs of prompts of more than 300 tokens are remembered over updates."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.remembered: dict[Any, Any] = {}

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(request.prompt_ids) <= 300:
            return output
        logs = output.log_probs.copy()
        for at, token in enumerate(output.token_ids.tolist()):
            key = request.prompt_ids, request.sampling.temperature, output.token_ids[:at].tobytes(), token
            logs[at] = self.remembered.setdefault(key, logs[at])
        return replace(output, log_probs=np.asarray(logs, np.float32))


class PausedLost(TransformersRolloutEngine):
    """An update that fails ends the samples that are paused."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        try:
            return super().update_weights(shards, version)
        except OSError:
            super().abort()
            raise


class CacheNeverKept(TransformersRolloutEngine):
    """What is to go on with old keys and values has them computed anew."""

    def resume(self, *, keep_cache: bool = False) -> None:
        super().resume()
