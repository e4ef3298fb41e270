"""`vllm`: a RolloutEngine around vLLM's own engine, in this process or in its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

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
from rlsdk.kit.generation.requests import check_requests, response_limit
from rlsdk.kit.generation.sampling import mixed_seed
from rlsdk.kit.generation.serving import check_rollout_spec, whole_layout, worker_layouts
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.kit.model.hf import build_model, canonical_tensors, dtype_names, persistent_buffers
from rlsdk.kit.weights import weight_updates
from rlsdk.kit.weights.file_tensors import file_tensors
from rlsdk.kit.weights.weight_fit import check_fits
from rlsdk_vllm.adapter import VllmEngine
from rlsdk_vllm.asynchronous import AsyncEngine
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.in_process import InProcessEngine
from rlsdk_vllm.requests import Progress
from rlsdk_vllm.samples import Abort, Call, Sample

PAUSED_S = 0.005
"""Seconds between checks whether a paused engine was resumed."""


class VllmRolloutEngine(RolloutEngine):
    """All calls of `generate` share vLLM's batches. In this process, callers that wait for samples step vLLM; in its
    own process (`VllmOptions.asynchronous`) vLLM runs independently, and callers collect samples.

    Weights are written directly into the parameters that the model computes with, where vLLM's own loaders would put
    them, and fingerprints are read back from there. Updates are refused while requests run, unless they are paused;
    their KV cache is then recomputed.
    """

    num_tokens = 0
    """Tokens sampled so far; kept here so that it can be read at any time."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        check_rollout_spec(spec, VllmOptions)
        self.ctx, self.spec = ctx, spec
        options = spec.options if isinstance(spec.options, VllmOptions) else VllmOptions()
        skeleton = build_model(spec.model, empty=True)
        tensors, self.tied = canonical_tensors(skeleton)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = dtype_names(persistent_buffers(skeleton))
        """Dtypes of buffers, which keep their own."""
        sources = file_tensors(skeleton, self.shapes)
        if spec.load_weights:
            check_fits(spec.model, skeleton, self.shapes, self.tied, sources)
        kind = AsyncEngine if options.asynchronous else InProcessEngine
        self.engine: VllmEngine = kind(ctx, spec, options, self.shapes, sources)
        if found := self.engine.prepare(self.shapes):
            self.engine.close()
            raise ConfigError(
                f"model.path {spec.model.path!r}: vLLM cannot serve it with weights that can be replaced and verified: "
                f"{found[0]} (and {len(found) - 1} more). Run it without quantization, or with another rollout backend"
            )
        self.wants_checksum = options.engine_checksums
        if self.wants_checksum and self.engine.checksum() is None:
            self.engine.close()
            raise ConfigError(
                "rollout.vllm.engine_checksums true: this version of vLLM computes no checksums (0.32 does); give "
                "false: the fingerprints in receipts still verify updates"
            )
        self.stop_text = StopText(spec.model)
        self.samples: dict[str, Sample] = {}
        self.aborts: deque[Abort] = deque()
        """Aborts to apply before the next step."""
        self.version = 0
        self.asleep: set[str] = set()
        self.paused = False
        self.num_calls = 0
        self.lock = threading.RLock()
        """Held while the engine is stepped, gets requests or changes weights."""

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
        if "kv_cache" not in self.asleep:
            self._drop_caches()
        receipt = weight_updates.make_receipt(
            self.shapes, self.spec.model.dtype, self.engine.fingerprints(), version, workers
        )
        if self.wants_checksum:
            receipt = replace(receipt, engine_checksum=self.engine.checksum())
        self.engine.serve(version)
        self.version = version
        return receipt

    def num_decoded(self) -> int:
        return self.num_tokens

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
            check_requests(requests, max_model_tokens=self.spec.max_model_tokens, vocabulary=self.engine.vocabulary)
            for request in requests:
                self.stop_text.prepare(request.sampling.stop_strings)
            self.num_calls += 1
            call.number = self.num_calls
            for at, request in enumerate(requests):
                self._add(call, at, request)

    def _add(self, call: Call, at: int, request: GenerationRequest) -> None:
        """Adds all samples of a request."""
        asked = request.sampling
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
        finished, request = progress.finished, sample.request
        for token, log_prob, version in zip(progress.token_ids, progress.log_probs, progress.versions, strict=True):
            sample.extend([token], [log_prob], version)
            if self.stop_text.ended(request.sampling.stop_strings, sample.token_ids, request.response_ids):
                if finished is None:
                    self.engine.abort([sample.key])
                finished = FinishReason.STOP
                break
        if finished is not None:
            sample.check_finite()
            del self.samples[sample.key]
            sample.finish(finished, self.version)

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
                    sample.finish(FinishReason.ABORT, self.version)

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
