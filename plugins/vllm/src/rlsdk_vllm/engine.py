"""`vllm`: a RolloutEngine around vLLM's own engine, in this process or in its own."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from rlsdk.interfaces import (
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RlsdkError,
    RolloutSpec,
    SamplingParams,
    WeightLayout,
)
from rlsdk.kit.generation.requests import response_limit
from rlsdk.kit.generation.sampling import mixed_seed
from rlsdk.kit.generation.serving import check_rollout_spec, whole_layout, worker_layouts
from rlsdk.kit.generation.shared_batch import SharedBatchEngine
from rlsdk.kit.model.hf import dtype_names, persistent_buffers
from rlsdk_vllm.adapter import VllmEngine
from rlsdk_vllm.asynchronous import AsyncEngine
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.environment import has_own_process
from rlsdk_vllm.in_process import InProcessEngine
from rlsdk_vllm.low_rank import adapter_slots
from rlsdk_vllm.requests import Progress
from rlsdk_vllm.samples import Abort, Call, Sample

PAUSED_S = 0.005
"""Seconds between checks whether a paused engine was resumed."""


class VllmRolloutEngine(SharedBatchEngine):
    """In this process, callers that wait for samples step vLLM; in its own process (`VllmOptions.asynchronous`) vLLM
    runs independently, and callers collect samples."""

    library = "vLLM"
    scores_prompts = True

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        check_rollout_spec(spec, VllmOptions)
        options = spec.options if isinstance(spec.options, VllmOptions) else VllmOptions()
        self.max_adapters = adapter_slots(spec, options)
        self.dtypes = dtype_names(persistent_buffers(self.read_model(ctx, spec)))
        """Dtypes of buffers, which keep their own."""
        kind = AsyncEngine if has_own_process(ctx, spec, options) else InProcessEngine
        self.engine: VllmEngine = kind(ctx, spec, options, self.shapes, self.sources)
        self.check_servable(self.engine.prepare(self.shapes))
        self.wants_checksum = options.engine_checksums
        if self.wants_checksum and self.engine.checksum() is None:
            self.engine.close()
            raise ConfigError(
                "rollout.vllm.engine_checksums true: this version of vLLM computes no checksums (0.32 does); give "
                "false: the fingerprints in receipts still verify updates"
            )
        self._prepare_adapter()
        self.samples: dict[str, Sample] = {}
        self.aborts: deque[Abort] = deque()
        """Aborts to apply before the next step."""
        self.asleep: set[str] = set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        call = Call()
        try:
            self._admit(call, requests)
            while call.left or call.finished:
                self._step()
                for output in call.take():
                    yield output
                # Lets other calls and `abort` run.
                await asyncio.sleep(PAUSED_S if self.paused else self.engine.turn_s)
        finally:
            with self.lock:
                self._withdraw([sample.key for sample in self.samples.values() if sample.call is call])

    def layout(self) -> Sequence[WeightLayout]:
        if self.engine.is_spread:
            workers, apart = self.engine.describe_workers(), self.engine.spans_nodes
            return worker_layouts(self.ctx, workers, self.shapes, self.tied, spans_nodes=apart)
        return [whole_layout(self.ctx, self.spec.model.dtype, self.shapes, self.tied, dtypes=self.dtypes)]

    def drop_outdated_caches(self) -> None:
        if "kv_cache" not in self.asleep:
            self._drop_caches()

    def engine_checksum(self) -> str | None:
        return self.engine.checksum() if self.wants_checksum else None

    def kv_used(self) -> float | None:
        return self.engine.kv_used()

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Aborts before the next step, even while the engine is paused. Thread-safe.

        It does not wait: the next step determines the affected samples. Calls are numbered before their samples are
        added, so a call is aborted with all its samples or not at all.
        """
        names = None if request_ids is None else frozenset(request_ids)
        self.aborts.append(Abort(names, self.num_calls))

    def pause(self) -> None:
        """Pauses before the next step; unfinished samples keep their state."""
        self.paused = True
        self.engine.pause()

    def resume(self, *, keep_cache: bool = False) -> None:
        with self.lock:
            self.paused = False
            self.engine.resume()

    def sleep(self, level: int = 1) -> None:
        """Frees the KV cache; level 2 frees weights too, level 1 keeps them on the host."""
        with self.lock:
            self._drop_caches()
            if self.ctx.device != "cpu":
                self.engine.sleep(level)
            else:
                self.engine.release(("kv_cache",) if level == 1 else ("kv_cache", "weights"))
            self.asleep = {"weights", "kv_cache"}

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        with self.lock:
            if self.ctx.device != "cpu":
                self.engine.wake(parts)
            else:
                self.engine.restore(parts)
            self.asleep -= set(parts)

    def close(self) -> None:
        """Ends the engine; running calls fail."""
        if hasattr(self, "engine"):
            with self.lock:
                self._fail(RlsdkError("the engine was closed while this call ran"))
                self.engine.close()
                del self.engine

    def _admit(self, call: Call, requests: Sequence[GenerationRequest]) -> None:
        """Adds all samples of a call, if they can be served."""
        with self.lock:
            self.check_call(requests)
            self.num_calls += 1
            call.number = self.num_calls
            for at, request in enumerate(requests):
                self._add(call, at, request)

    def _add(self, call: Call, at: int, request: GenerationRequest) -> None:
        """Adds all samples of a request."""
        asked = request.sampling
        version, adapter = self.adapter_of(request)
        base = (asked.seed,) if asked.seed is not None else (self.ctx.seed, self.ctx.rank, call.number, at)
        limit = response_limit(request, self.spec.max_model_tokens)
        for index in range(request.first_sample, request.first_sample + request.n):
            sample = Sample(
                key=f"{call.number}-{at}-{index}",
                call=call,
                request=request,
                index=index,
                seed=mixed_seed(*base, index) >> 1,
                limit=limit,
                version=version,
                adapter=adapter,
            )
            self.engine.add(sample)
            self.samples[sample.key] = sample
            call.left += 1

    def _step(self) -> None:
        """Collects new tokens for all calls, in this process by one pass of the model; an error fails every call."""
        with self.lock:
            self._leave_aborted()
            if not self.samples:
                return
            try:
                for progress in self.engine.step():
                    self._take(progress)
            except BaseException as error:
                self._fail(error)
                raise

    def _take(self, progress: Progress) -> None:
        self.num_tokens += len(progress.token_ids)
        sample = self.samples.get(progress.key)
        if sample is None:
            return
        if progress.prompt is not None:
            sample.prompt_log_probs = progress.prompt
        finished = progress.finished
        # Under an adapter, a sample stays with the version that it began with.
        versions = [sample.version] * len(progress.token_ids) if self.low else progress.versions
        if self.extend_until_stop(sample, progress.token_ids, progress.log_probs, versions):
            if finished is None:
                self.engine.abort([sample.key])
            finished = FinishReason.STOP
        if finished is not None:
            sample.check_finite()
            del self.samples[sample.key]
            sample.finish(finished, self.version_of(sample))

    def _prepare_adapter(self) -> None:
        """Refuses an adapter that vLLM would accept and not compute with."""
        modules = sorted({name.rpartition(".lora_")[0] for name in self.low})
        if self.low and (ignored := self.engine.unbound(modules)):
            engine = self.engine
            del self.engine
            engine.close()
            raise ConfigError(
                f"model.lora.targets: vLLM accepts an adapter of {', '.join(map(repr, ignored[:3]))} and does not "
                f"compute with it ({len(ignored)} of {len(modules)} layers); leave it out, or give model.lora.sync "
                "merged"
            )

    def first_log_prob(self, ids: Sequence[int], adapter: int | None) -> float:
        """See `SharedBatchEngine`. Alone if no sample runs, so that equal weights give equal numbers."""
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerationRequest(request_id="probe", prompt_ids=tuple(ids), sampling=greedy)
        key = f"probe-{self.num_adapters}-{adapter}"
        self.engine.add(Sample(key=key, call=Call(), request=request, index=0, seed=0, limit=1, adapter=adapter))
        while True:
            for progress in self.engine.step():
                if progress.key != key:
                    self._take(progress)
                elif progress.log_probs:
                    return float(progress.log_probs[0])
            time.sleep(self.engine.turn_s)

    def _leave_aborted(self) -> None:
        """Returns the tokens of aborted samples."""
        while self.aborts:
            abort = self.aborts.popleft()
            hit = [sample for sample in self.samples.values() if abort.means(sample)]
            self._withdraw([sample.key for sample in hit])
            for sample in hit:
                try:
                    sample.check_finite()
                except RlsdkError as error:
                    sample.call.error = error
                else:
                    sample.finish(FinishReason.ABORT, self.version_of(sample))

    def _withdraw(self, keys: Sequence[str]) -> None:
        if keys:
            self.engine.abort(keys)
            for key in keys:
                del self.samples[key]

    def _fail(self, error: BaseException) -> None:
        """Fails all running calls with this error."""
        for sample in self.samples.values():
            sample.call.error = error
        self._withdraw(list(self.samples))

    def _drop_caches(self) -> None:
        """Drops the KV cache. Attention may multiply unused blocks by 0, which keeps NaN, so a cache with NaN is
        overwritten."""
        self.engine.drop_caches()
        if self.engine.is_spoiled():
            self.engine.clear_caches()
