"""Rollout engines that are wrong where one event happens inside another: a pause in a sleep, a sleep without weights,
an abort in an update, an update between two samples of a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import (
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.kit.model.hf import persistent_buffers
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class WakeEndsThePause(TransformersRolloutEngine):
    """Waking the KV cache also ends a pause."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "kv_cache" in parts:
            self.paused = False


class AbortWaitsForUpdate(TransformersRolloutEngine):
    """`abort` waits for the lock that an update holds."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self.lock:
            super().abort(request_ids)


class SourceInInferenceMode(TransformersRolloutEngine):
    """The source of an update runs in inference mode."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with torch.inference_mode():
            return super().update_weights(shards, version)


class UpdateSeeds(TransformersRolloutEngine):
    """An update seeds torch's generator, which the whole process uses."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        torch.manual_seed(version % 2**31)
        return super().update_weights(shards, version)


class SleepStopsGradients(TransformersRolloutEngine):
    """After a sleep nothing in the process records gradients."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        torch.set_grad_enabled(False)
        super().wake(parts)


class SleepNeedsWeights(TransformersRolloutEngine):
    """An engine whose update failed cannot sleep."""

    is_whole = True

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.is_whole = False
        receipt = super().update_weights(shards, version)
        self.is_whole = True
        return receipt

    def sleep(self, level: int = 1) -> None:
        if not self.is_whole:
            raise RuntimeError("there are no weights to keep")
        super().sleep(level)


class RemembersWeights(TransformersRolloutEngine):
    """Not broken: knows whether it ever had weights."""

    had_weights = False

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        self.had_weights = spec.load_weights

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.had_weights = True
        return super().update_weights(shards, version)


class SleepsOnceServed(RemembersWeights):
    """An engine that never had weights cannot sleep."""

    def sleep(self, level: int = 1) -> None:
        if not self.had_weights:
            raise RuntimeError("there are no weights to keep")
        super().sleep(level)


class LayoutOnceServed(RemembersWeights):
    """The layout of an engine that never had weights names another dtype."""

    def layout(self) -> Sequence[WeightLayout]:
        found = super().layout()
        if self.had_weights:
            return found
        return [replace(one, tensors=tuple(replace(m, dtype="bfloat16") for m in one.tensors)) for one in found]


class NaNsOfRecomputation(Patched):
    """Logits that are not finite are only looked for in steps, not where a KV cache is recomputed."""

    class RunningPart(Running):
        def recompute(self) -> None:
            super().recompute()
            self.is_checked = False

        def clear(self) -> None:
            super().clear()
            self.is_checked = True

        def _take(self, logits: Any, first: int, version: int) -> None:
            spoilt = not bool(torch.isfinite(logits).all())
            if spoilt and not getattr(self, "is_checked", True):
                logits = torch.nan_to_num(logits, 0.0, 0.0, 0.0)
            super()._take(logits, first, version)


class NoRequestsNoCall(Rewritten):
    """A call without requests fails."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        longest = max(len(request.prompt_ids) for request in requests)
        async for output in super().generate(requests):
            if longest:
                yield output


class ReceiptOfNumpy(TransformersRolloutEngine):
    """Fingerprints in receipts are numpy integers."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, fingerprints={name: np.uint32(value) for name, value in receipt.fingerprints.items()})


class LayoutOfTorch(TransformersRolloutEngine):
    """Shapes in the layout are those of torch."""

    def layout(self) -> Sequence[WeightLayout]:
        return [
            replace(one, tensors=tuple(replace(meta, shape=torch.Size(meta.shape)) for meta in one.tensors))
            for one in super().layout()
        ]


class CountOfNumpy(TransformersRolloutEngine):
    """The number of decoded tokens is a numpy integer."""

    def num_decoded(self) -> int:
        return np.int64(super().num_decoded())  # type: ignore[return-value]


class LeftInAPauseComesBack(TransformersRolloutEngine):
    """An update in a pause brings back the calls that were abandoned in it: their samples keep their slots."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.paused and getattr(self, "num_left", 0):
            self.decoder.max_running = max(1, self.decoder.max_running - self.num_left)
            self.num_left = 0
        return super().update_weights(shards, version)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        is_over = False
        try:
            async with aclosing(super().generate(requests)) as outputs:
                async for output in outputs:
                    yield output
            is_over = True
        finally:
            if not is_over and getattr(self, "paused", False):
                self.num_left = getattr(self, "num_left", 0) + 4


class StopsInWholeTokens(Patched):
    """Stop strings are looked for in the texts of single tokens, joined: a character cut between tokens is lost."""

    class StopPart(StopText):
        def ends(self, strings: Sequence[str], token_ids: Sequence[int]) -> bool:
            decode = self.tokenizer.decode
            text = "".join(decode([token], clean_up_tokenization_spaces=False) for token in token_ids)
            return any(string in text for string in strings)


class HostCopyOfNumpy(TransformersRolloutEngine):
    """After some updates sleep keeps the weights in numpy arrays, which have no bfloat16."""

    num_updates = 0

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.num_updates += 1
        return super().update_weights(shards, version)

    def sleep(self, level: int = 1) -> None:
        if self.num_updates > 4:
            _ = [parameter.numpy() for parameter in self.parameters.values()]
        super().sleep(level)


class BiasesLostInSleep(TransformersRolloutEngine):
    """Sleep at level 1 keeps parameters, but buffers are those of the first weights when the engine wakes."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        self.first = {name: buffer.clone() for name, buffer in persistent_buffers(self.model).items()}

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        for name, buffer in persistent_buffers(self.model).items():
            if buffer.shape == self.first[name].shape:
                buffer.copy_(0.5 * self.first[name])


class GradientsOfSources(TransformersRolloutEngine):
    """Weights are read as numpy arrays, which tensors that record gradients refuse."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def read() -> Iterator[WeightShard]:
            for shard in shards:
                with torch.enable_grad():
                    if shard.tensor.dtype == torch.float32:
                        shard.tensor.numpy()
                yield shard

        return super().update_weights(read(), version)


class SeedsOf63Bits(Rewritten):
    """The highest bit of a seed is lost."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is None or seed < 0:
            return request
        return replace(request, sampling=replace(request.sampling, seed=seed % 2**63))


class RunsInAList(Rewritten):
    """Versions are a list."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, versions=list(output.versions))  # type: ignore[arg-type]


class AllResumeAtOnce(TransformersRolloutEngine):
    """After a pause all samples run at once, those too that waited for a slot."""

    slots = 0

    def resume(self, *, keep_cache: bool = False) -> None:
        self.slots = self.slots or self.decoder.max_running
        if self.paused and self.decoder.jobs:
            self.decoder.max_running = 4 * self.slots
        super().resume(keep_cache=keep_cache)

    def _step(self) -> None:
        super()._step()
        if self.slots and not self.decoder.jobs:
            self.decoder.max_running = self.slots


class SlotsFreedTwice(TransformersRolloutEngine):
    """An abandoned call frees its slots twice: more samples than `max_running` run afterwards."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        is_over = False
        try:
            async with aclosing(super().generate(requests)) as outputs:
                async for output in outputs:
                    yield output
            is_over = True
        finally:
            if not is_over:
                self.decoder.max_running += sum(request.n for request in requests)
