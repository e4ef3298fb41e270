"""`sglang`: a RolloutEngine around `sglang.Engine`, whose schedulers are separate processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing

import numpy as np

from rlsdk.interfaces import (
    ConfigError,
    Delivery,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RlsdkError,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    WorkerReceipt,
)
from rlsdk.kit.files.weight_files import check_whole
from rlsdk.kit.generation.requests import check_requests, response_limit
from rlsdk.kit.generation.sampling import mixed_seed, row_keys
from rlsdk.kit.generation.serving import check_rollout_spec, worker_layouts
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.kit.memory.memory_parts import ROLLOUT_PARTS
from rlsdk.kit.model.hf import build_model, canonical_tensors
from rlsdk.kit.ranks.waiting import LOOK_S
from rlsdk.kit.weights import weight_updates
from rlsdk.kit.weights.file_tensors import file_tensors
from rlsdk.kit.weights.weight_fit import check_fits
from rlsdk_sglang.adapter import ServedModel
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.reports import Progress
from rlsdk_sglang.samples import Call, Sample

CLOSED = "the engine was closed while this call ran"
NO_WINDOWS = frozenset({"qwen2", "qwen3"})
"""Families whose sliding windows SGLang silently ignores."""


class SglangRolloutEngine(RolloutEngine):
    """SGLang runs independently; a thread of the engine reads the reports of samples.

    Weights are written directly into the parameters that the model computes with, where SGLang's own loaders would put
    them, in its weight sessions; fingerprints are read back from there. Updates are refused while requests run, unless
    they are paused; their KV cache is then recomputed.
    """

    num_tokens = 0
    """Tokens sampled so far; kept here so that it can be read at any time."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        check_rollout_spec(spec, SglangOptions)
        self.ctx, self.spec = ctx, spec
        options = spec.options if isinstance(spec.options, SglangOptions) else SglangOptions()
        skeleton = build_model(spec.model, empty=True)
        text = skeleton.config.get_text_config()
        if text.model_type in NO_WINDOWS and "sliding_attention" in (getattr(text, "layer_types", None) or ()):
            raise ConfigError(
                f"model.path {spec.model.path!r}: its attention has a sliding window of {text.sliding_window} tokens, "
                f"which SGLang does not apply to {text.model_type!r}: log-probs would be wrong. Run it with another "
                "rollout backend: rollout.backend vllm"
            )
        tensors, self.tied = canonical_tensors(skeleton)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sources = file_tensors(skeleton, self.shapes)
        if spec.load_weights:
            # SGLang would serve a missing tensor as its memory happens to be.
            written = self.shapes if sources is None else {source.name for source in sources}
            check_whole(spec.model, written, self.tied)
            check_fits(spec.model, skeleton, self.shapes, self.tied, sources)
        self.engine = ServedModel(ctx, spec, options)
        found = self.engine.prepare(self.shapes, sources)
        if found:
            self.engine.close()
            raise ConfigError(
                f"model.path {spec.model.path!r}: SGLang cannot serve it with weights that can be replaced and "
                f"verified: {found[0]} (and {len(found) - 1} more). Run it without quantization, or with another "
                "rollout backend"
            )
        self.stop_text = StopText(spec.model)
        self.samples: dict[str, Sample] = {}
        """Running samples by key. This and `tasks` change on the engine's thread only."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.version = 0
        self.released: set[str] = set()
        """Parts whose memory was freed."""
        self.released_bytes = 0
        """Bytes freed by the last `sleep`, if known: on a CPU."""
        self.paused = False
        self.num_calls = 0
        self.lock = threading.RLock()
        """Held while samples are started or weights are changed."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self._check_alive()
        check_requests(requests, max_model_tokens=self.spec.max_model_tokens, vocabulary=self.engine.vocabulary)
        for request in requests:
            self.stop_text.prepare(request.sampling.stop_strings)
        call = Call(sum(request.n for request in requests))
        with self.lock:
            self.num_calls += 1
            samples = [s for at, request in enumerate(requests) for s in self._samples(call, at, request)]
            self.engine.call(self._begin, samples)
        try:
            while outputs := await self._wait_for_finished(call):
                for output in outputs:
                    yield output
        finally:
            if call.left and hasattr(self, "engine"):
                self.engine.call(self._withdraw, samples)

    def layout(self) -> Sequence[WeightLayout]:
        apart = self.engine.spans_nodes
        return worker_layouts(self.ctx, self.engine.workers, self.shapes, self.tied, spans_nodes=apart)

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with self.lock:
            self._check_idle(version)
            self.engine.write(weight_updates.check_shards(self.shapes, shards, version))
            return self._serve(version, ())

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        with self.lock:
            self._check_idle(version)
            return self._serve(version, self.engine.receive(deliveries, version))

    def _check_idle(self, version: int) -> None:
        if self.samples and not self.paused:
            raise WeightSyncError(
                f"version {version} arrived while {len(self.samples)} samples are running; finish, abort or pause them "
                "first"
            )

    def _serve(self, version: int, workers: tuple[WorkerReceipt, ...]) -> SyncReceipt:
        """Starts to serve updated weights, and verifies them."""
        # KV cache and version change together: old weights never get the new version, nor new weights the old cache.
        self.engine.drop_caches(paused=self.paused)
        receipt = weight_updates.make_receipt(
            self.shapes, self.spec.model.dtype, self.engine.fingerprints(), version, workers
        )
        self.engine.name_version(version)
        self.version = version
        return receipt

    def num_decoded(self) -> int:
        return self.num_tokens

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Aborts requests, with the tokens that SGLang has reported. Thread-safe."""
        wanted = None if request_ids is None else set(request_ids)

        def leave() -> None:
            running = list(self.samples.values())
            for sample in running:
                if wanted is None or sample.request.request_id in wanted:
                    self._end(sample, FinishReason.ABORT)

        self.engine.call(leave)

    def pause(self) -> None:
        """Pauses: unfinished samples keep their tokens, but not their KV cache."""
        self.engine.pause()
        self.paused = True

    def resume(self, *, keep_cache: bool = False) -> None:
        self.engine.resume()
        self.paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees the KV cache; level 2 frees weights too. Level 1 keeps weights: on a GPU it moves them to host memory
        if the engine loaded its own weights (`load_weights`); otherwise they stay where they are."""
        with self.lock:
            kept_on_host = self.ctx.device != "cpu" and self.spec.load_weights
            wanted = ROLLOUT_PARTS if level > 1 or kept_on_host else ("kv_cache",)
            if releasing := [part for part in wanted if part not in self.released]:
                self.released_bytes = self.engine.sleep(releasing)
                self.released.update(releasing)

    def wake(self, parts: Sequence[str] = ROLLOUT_PARTS) -> None:
        with self.lock:
            if waking := [part for part in parts if part in self.released]:
                self.engine.wake(waking)
                self.released -= set(waking)

    def close(self) -> None:
        """Ends the engine; running calls fail."""
        if hasattr(self, "engine"):
            with self.lock:
                self.engine.call(self._fail, RlsdkError(CLOSED))
                self.engine.close()
                del self.engine

    def _samples(self, call: Call, at: int, request: GenerationRequest) -> list[Sample]:
        """All samples of the request with this index in a call."""
        seed = request.sampling.seed
        if seed is None:
            seed = mixed_seed(self.ctx.seed, self.ctx.rank, self.num_calls, at)
        indices = np.arange(request.first_sample, request.first_sample + request.n)
        keys = row_keys(np.full(request.n, seed % 2**64, np.uint64), indices).view(np.int64)
        limit = response_limit(request, self.spec.max_model_tokens)
        return [
            Sample(
                key=f"{self.num_calls}-{at}-{index}.",
                call=call,
                request=request,
                index=index,
                seed=key,
                limit=limit,
            )
            for index, key in zip(indices.tolist(), keys.tolist(), strict=True)
        ]

    async def _wait_for_finished(self, call: Call) -> list[GenerationOutput]:
        """Waits for finished samples and returns them; empty if no sample is left."""
        while True:
            try:
                return await asyncio.wait_for(call.take(), LOOK_S)
            except TimeoutError:
                self._check_alive()

    def _check_alive(self) -> None:
        if not hasattr(self, "engine"):
            raise RlsdkError(CLOSED)
        self.engine.check_alive()

    # The methods below run on the engine's thread.

    def _begin(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.samples[sample.key] = sample
            self.tasks[sample.key] = self.engine.create_task(self._follow(sample))

    async def _follow(self, sample: Sample) -> None:
        """Reads reports of a sample until it ends; an error fails its call."""
        try:
            async with aclosing(self.engine.follow(sample)) as reports:
                async for progress in reports:
                    self._take(sample, progress)
                    if sample.key not in self.samples:
                        return
        except Exception as error:
            sample.call.fail(error)
            self._withdraw([sample])

    def _take(self, sample: Sample, progress: Progress) -> None:
        self.num_tokens += len(progress.token_ids)
        request = sample.request
        for token, log_prob in zip(progress.token_ids, progress.log_probs, strict=True):
            sample.extend([token], [log_prob], self.version)
            if self.stop_text.ended(request.sampling.stop_strings, sample.token_ids, request.response_ids):
                self._end(sample, FinishReason.STOP)
                return
        if progress.versions is not None and sample.token_ids:
            sample.versions = list(progress.versions)
        if progress.finished is not None:
            self._end(sample, progress.finished)

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        self._withdraw([sample])
        try:
            sample.check_finite()
        except RlsdkError as error:
            sample.call.fail(error)
        else:
            sample.finish(reason, self.version)

    def _withdraw(self, samples: Sequence[Sample]) -> None:
        """Removes samples; SGLang aborts those that are still running."""
        for sample in samples:
            task = self.tasks.pop(sample.key, None)
            self.samples.pop(sample.key, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _fail(self, error: BaseException) -> None:
        """Fails all running calls with this error."""
        running = list(self.samples.values())
        for sample in running:
            sample.call.fail(error)
        self._withdraw(running)
