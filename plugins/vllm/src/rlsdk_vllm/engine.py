"""`vllm`: a RolloutEngine around vLLM's own engine, in this process."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Head,
    RankContext,
    RlsdkError,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    TensorMeta,
    WeightLayout,
    WeightShard,
    WeightSyncError,
)
from rlsdk.kit import intake
from rlsdk.kit.hf import build_model, canonical_parameters
from rlsdk.kit.requests import check_requests
from rlsdk.kit.stop_text import StopText
from rlsdk_vllm.adapter import InProcessEngine, Progress
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.samples import Call, Sample, mixed_seed

PAUSED_S = 0.005
"""Between two looks whether a paused engine goes on."""


class VllmRolloutEngine(RolloutEngine):
    """vLLM, stepped by whoever waits for samples; all calls of `generate` share its batches.

    Weights are written straight into the parameters that the model computes with, wherever vLLM's own loaders would
    have put them, and fingerprints are read back from there. A failed update leaves the engine without weights: it
    refuses `generate` until a whole update has come. Updates are refused while requests run, unless they are paused;
    what was computed for them under the old weights is then computed anew.
    """

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        check_spec(spec)
        self.ctx, self.spec = ctx, spec
        options = spec.options if isinstance(spec.options, VllmOptions) else VllmOptions()
        skeleton = build_model(spec.model, empty=True)
        parameters, self.tied = canonical_parameters(skeleton)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.engine = InProcessEngine(ctx, spec, options, self.shapes)
        if found := self.engine.prepare():
            self.engine.close()
            raise ConfigError(
                f"model.path {spec.model.path!r}: vLLM cannot serve it with weights that can be replaced and proven: "
                f"{found[0]} (and {len(found) - 1} more). Run it without quantization, or with another rollout backend"
            )
        self.stop_text = StopText(spec.model)
        self.samples: dict[str, Sample] = {}
        self.aborting: deque[str] = deque()
        """Keys of samples to end before the next step."""
        self.version: int | None = 0 if spec.load_weights else None
        self.refusal = "no weights have come yet; the first update_weights brings them"
        """Why nothing is served while `version` is None."""
        self.asleep: set[str] = set()
        self.paused = False
        self.num_calls = 0
        self.lock = threading.RLock()
        """Held by whoever steps the engine or touches the weights."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self._served()
        check_requests(requests, max_model_tokens=self.spec.max_model_tokens, vocabulary=self.engine.vocabulary)
        for request in requests:
            if request.sampling.stop_strings:
                self.stop_text.window(request.sampling.stop_strings)
                _ = self.stop_text.tokenizer
        call = Call()
        try:
            with self.lock:
                self.num_calls += 1
                for at, request in enumerate(requests):
                    self._add(call, at, request)
            while call.left or call.finished:
                self._step()
                for output in call.take():
                    yield output
                # Lets other calls have their turn, and `abort`.
                await asyncio.sleep(PAUSED_S if self.paused else 0)
        finally:
            with self.lock:
                self._withdraw([sample.key for sample in self.samples.values() if sample.call is call])

    def layout(self) -> Sequence[WeightLayout]:
        dtype = self.spec.model.dtype
        return [
            WeightLayout(
                rank=0,
                node=self.ctx.node,
                device=self.ctx.device,
                process=f"{self.ctx.node}:{os.getpid()}",
                tensors=tuple(TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape in self.shapes.items()),
                boxes=tuple((name, Box.whole(shape)) for name, shape in self.shapes.items()),
                tied=self.tied,
            )
        ]

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with self.lock:
            if self.samples and not self.paused:
                raise WeightSyncError(
                    f"version {version} came while {len(self.samples)} samples run; end, abort or pause them"
                )
            self._awake("weights")
            self.version = None
            self.refusal = f"the update to version {version} failed half-way; only a whole update mends it"
            self.engine.write(intake.checked(self.shapes, shards, version))
            # Keys and values of the old weights, and the version: neither is ever seen with the other's.
            if "kv_cache" not in self.asleep:
                self.engine.drop_caches()
            fingerprints = intake.joined(self.engine.fingerprints(), version)
            self.version = version
        num_bytes = sum(map(math.prod, self.shapes.values())) * DTYPE_BYTES[self.spec.model.dtype]
        return SyncReceipt(
            version=version, num_tensors=len(fingerprints), num_bytes=num_bytes, fingerprints=fingerprints
        )

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Takes effect before the next step, also of a paused engine. May be called from any thread."""
        wanted = None if request_ids is None else set(request_ids)
        running = list(self.samples.values())
        self.aborting.extend(s.key for s in running if wanted is None or s.request.request_id in wanted)

    def pause(self) -> None:
        """Takes effect before the next step; unfinished samples keep what they have."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees keys and values, with level 2 weights as well. Level 1 keeps weights on the host."""
        with self.lock:
            if self.samples:
                raise RlsdkError(f"sleep was asked for while {len(self.samples)} samples run; end or abort them")
            self.engine.drop_caches()
            if self.ctx.device != "cpu":
                self.engine.sleep(level)
            else:
                self.engine.park(("kv_cache",) if level == 1 else ("kv_cache", "weights"))
            if level > 1:
                self.version, self.refusal = None, "its weights were dropped by sleep: wake it, then update them"
            self.asleep = {"weights", "kv_cache"}

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        with self.lock:
            waking = [part for part in ("weights", "kv_cache") if part in parts and part in self.asleep]
            if waking and self.ctx.device != "cpu":
                self.engine.wake(waking)
            elif waking:
                self.engine.restore(waking)
            self.asleep -= set(waking)

    def close(self) -> None:
        """Ends the engine; what runs is ended with an error."""
        self.version, self.refusal = None, "the engine was closed"
        if hasattr(self, "engine"):
            with self.lock:
                self._fail(RlsdkError(self.refusal))
                self.engine.close()
                del self.engine

    def _add(self, call: Call, at: int, request: GenerationRequest) -> None:
        """Gives all samples of a request to the engine."""
        asked = request.sampling
        base = (asked.seed,) if asked.seed is not None else (self.ctx.seed, self.ctx.rank, self.num_calls, at)
        limit = min(asked.max_tokens, self.spec.max_model_tokens - len(request.prompt_ids))
        for index in range(request.n):
            sample = Sample(
                key=f"{self.num_calls}-{at}-{index}",
                call=call,
                request=request,
                index=index,
                seed=mixed_seed(*base, index),
                limit=limit,
            )
            self.engine.add(sample)
            self.samples[sample.key] = sample
            call.left += 1

    def _step(self) -> None:
        """One pass for all calls; an error in it is every call's."""
        with self.lock:
            self._leave_aborted()
            if self.paused or not self.samples:
                return
            version = self._served()
            try:
                for progress in self.engine.step():
                    self._take(progress, version)
            except BaseException as error:
                self._fail(error)
                raise

    def _take(self, progress: Progress, version: int) -> None:
        sample = self.samples.get(progress.key)
        if sample is None:
            return
        sample.extend(progress.token_ids, progress.log_probs, version)
        finished = progress.finished
        if self._ends_in_text(sample):
            if finished is None:
                self.engine.abort([sample.key])
            finished = FinishReason.STOP
        if finished is not None:
            if not all(map(math.isfinite, sample.log_probs)):
                raise RlsdkError(
                    f"the model gives logits that are not finite, with the weights of version {version}: training has "
                    "diverged, or the weights are damaged"
                )
            del self.samples[sample.key]
            sample.finish(finished, version)

    def _ends_in_text(self, sample: Sample) -> bool:
        strings = sample.request.sampling.stop_strings
        if not strings or not sample.token_ids:
            return False
        return self.stop_text.ends(strings, sample.token_ids[-self.stop_text.window(strings) :])

    def _leave_aborted(self) -> None:
        """Gives out what aborted samples have."""
        while self.aborting:
            sample = self.samples.get(self.aborting.popleft())
            if sample is not None:
                self._withdraw([sample.key])
                sample.finish(FinishReason.ABORT, self.version or 0)

    def _withdraw(self, keys: Sequence[str]) -> None:
        if keys:
            self.engine.abort(keys)
            for key in keys:
                del self.samples[key]

    def _fail(self, error: BaseException) -> None:
        """Ends everything that runs with this error."""
        for sample in self.samples.values():
            sample.call.error = error
        self._withdraw(list(self.samples))

    def _served(self) -> int:
        self._awake("weights", "kv_cache")
        if self.version is None:
            raise WeightSyncError(f"nothing can be generated: {self.refusal}")
        return self.version

    def _awake(self, *parts: str) -> None:
        if self.asleep & set(parts):
            raise RlsdkError(f"the engine is asleep: wake {sorted(self.asleep)} first")


def check_spec(spec: RolloutSpec) -> None:
    """Raises: ConfigError: no engine of this kind could serve it."""
    if spec.model.head is not Head.LM:
        raise ConfigError(f"a rollout engine serves a model with head 'lm', not {spec.model.head.value!r}")
    if spec.options is not None and not isinstance(spec.options, VllmOptions):
        raise ConfigError(f"RolloutSpec.options is a {type(spec.options).__name__}; expected VllmOptions, or None")
    for name, value, least in (
        ("tp_size", spec.tp_size, 1),
        ("max_running", spec.max_running, 1),
        ("max_model_tokens", spec.max_model_tokens, 2),
    ):
        if value < least:
            raise ConfigError(f"{name} {value}: expected {least} or more")
