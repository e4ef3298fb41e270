"""`sglang`: a RolloutEngine around `sglang.Engine`, whose schedulers are separate processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np

from rlsdk.interfaces import (
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RlsdkError,
    RolloutSpec,
    WeightLayout,
)
from rlsdk.kit.generation.requests import response_limit
from rlsdk.kit.generation.sampling import mixed_seed, row_keys
from rlsdk.kit.generation.serving import check_rollout_spec, worker_layouts
from rlsdk.kit.generation.shared_batch import SharedBatchEngine
from rlsdk.kit.memory.memory_parts import ROLLOUT_PARTS
from rlsdk.kit.model.hf import load_model_config
from rlsdk.kit.ranks.waiting import LOOK_S
from rlsdk_sglang.adapter import ServedModel
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.low_rank import adapter_slots, check_adapter
from rlsdk_sglang.reports import Progress
from rlsdk_sglang.samples import Call, Sample

CLOSED = "the engine was closed while this call ran"
NO_WINDOWS = frozenset({"qwen2", "qwen3"})
"""Families whose sliding windows SGLang silently ignores."""


class SglangRolloutEngine(SharedBatchEngine):
    """SGLang runs independently; a thread of the engine reads the reports of samples. Weights are written in SGLang's
    weight sessions."""

    library = "SGLang"
    scores_prompts = True

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        check_rollout_spec(spec, SglangOptions)
        options = spec.options if isinstance(spec.options, SglangOptions) else SglangOptions()
        text = load_model_config(spec.model).get_text_config()
        if text.model_type in NO_WINDOWS and "sliding_attention" in (getattr(text, "layer_types", None) or ()):
            raise ConfigError(
                f"model.path {spec.model.path!r}: its attention has a sliding window of {text.sliding_window} tokens, "
                f"which SGLang does not apply to {text.model_type!r}: log-probs would be wrong. Run it with another "
                "rollout backend: rollout.backend vllm"
            )
        self.max_adapters = adapter_slots(spec, options)
        self.read_model(ctx, spec, loads_silently=True)
        if self.low:
            check_adapter(spec, options, sorted({name.rpartition(".lora_")[0] for name in self.low}))
        self.engine: ServedModel = ServedModel(ctx, spec, options)
        self.check_servable(self.engine.prepare(self.shapes, self.sources))
        self.samples: dict[str, Sample] = {}
        """This and `tasks` change on the engine's thread only."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.released: set[str] = set()
        """Parts whose memory was freed."""
        self.released_bytes = 0
        """Bytes freed by the last `sleep`, if known: on a CPU."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self._check_alive()
        with self.lock:
            self.check_call(requests)
            call = Call(sum(request.n for request in requests))
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

    def first_log_prob(self, ids: Sequence[int], adapter: int | None) -> float:
        return self.engine.first_log_prob(ids, adapter)

    def drop_outdated_caches(self) -> None:
        self.engine.drop_caches(paused=self.paused)

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
        version, adapter = self.adapter_of(request)
        return [
            Sample(
                key=f"{self.num_calls}-{at}-{index}.",
                call=call,
                request=request,
                index=index,
                seed=key,
                limit=limit,
                version=version,
                adapter=adapter,
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
        if sample.prompt_log_probs is None:
            sample.prompt_log_probs = progress.prompt
        versions = [self.version_of(sample)] * len(progress.token_ids)
        if self.extend_until_stop(sample, progress.token_ids, progress.log_probs, versions):
            self._end(sample, FinishReason.STOP)
            return
        if progress.versions is not None and sample.token_ids and not self.low:
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
            sample.finish(reason, self.version_of(sample))

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
