"""Rollout engines that handle calls wrongly: concurrency, streaming, cancellation, validation, event loop, threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import ConfigError, GenerationOutput, GenerationRequest, RankContext, RolloutSpec
from rlsdk.kit.generation.requests import check_requests
from rlsdk.reference.jobs import Call
from rlsdk.reference.transformers_rollout import PAUSED_S, TransformersRolloutEngine


class OneCallAtATime(Rewritten):
    """A call waits until the previous one has ended."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.turn = asyncio.Lock()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async with self.turn:
            async for output in super().generate(requests):
                yield output


class LoopOfItsOwn(TransformersRolloutEngine):
    """`sleep` runs an event loop, which fails inside another one."""

    def sleep(self, level: int = 1) -> None:
        async def work() -> None:
            TransformersRolloutEngine.sleep(self, level)

        coroutine = work()
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()


class NamesRunTogether(Rewritten):
    """Samples are stored under the id and the index without a separator."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        known: dict[str, tuple[str, int]] = {}
        for request in requests:
            for index in range(request.first_sample, request.first_sample + request.n):
                known[f"{request.request_id}{index}"] = (request.request_id, index)
        async for output in super().generate(requests):
            name, index = known[f"{output.request_id}{output.sample_index}"]
            yield replace(output, request_id=name, sample_index=index)


class AllAtTheEnd(Rewritten):
    """Samples are returned when the last one has ended."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        outputs = [output async for output in super().generate(requests)]
        for output in sorted(outputs, key=lambda output: -len(output.token_ids)):
            yield output


class OneBuffer(Rewritten):
    """All samples are views of one buffer."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.ids, self.logs = np.zeros(spec.max_model_tokens, np.int64), np.zeros(spec.max_model_tokens, np.float32)

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        length = len(output.token_ids)
        self.ids[:length], self.logs[:length] = output.token_ids, output.log_probs
        return replace(output, token_ids=self.ids[:length], log_probs=self.logs[:length])


class NoGradient(Rewritten):
    """Gradients are disabled while `generate` waits for its caller."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        with torch.no_grad():
            async for output in super().generate(requests):
                yield output


class NothingFails(Rewritten):
    """A call without requests raises an error."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        longest = max(len(request.prompt_ids) for request in requests)
        assert longest
        async for output in super().generate(requests):
            yield output


class JoinsWithoutFirst(Rewritten):
    """Requests that join a running batch are sampled with the settings of the batch's first request."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.current: list[float] = []

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        joined = [
            replace(request, sampling=replace(request.sampling, temperature=self.current[0]))
            if self.current and request.sampling.temperature
            else request
            for request in requests
        ]
        warm = [request.sampling.temperature for request in joined if request.sampling.temperature][:1]
        self.current += warm
        try:
            async for output in super().generate(joined):
                yield output
        finally:
            for temperature in warm:
                self.current.remove(temperature)


class NeverWithdraws(TransformersRolloutEngine):
    """An abandoned call continues as soon as another one steps the engine."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.decoder.withdraw = lambda call: None  # type: ignore[method-assign]


class LeftTakesAll(TransformersRolloutEngine):
    """An abandoned call aborts all others."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        whole = False
        try:
            async for output in super().generate(requests):
                yield output
            whole = True
        finally:
            if not whole and len(self.decoder.jobs):
                self.abort()


class SlotsLeft(TransformersRolloutEngine):
    """An abandoned call leaks a slot."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        whole = False
        try:
            async for output in super().generate(requests):
                yield output
            whole = True
        finally:
            if not whole:
                self.decoder.max_running = max(self.decoder.max_running - 1, 1)


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
    """Nothing is decoded for one call while another call's caller processes a sample."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async for output in super().generate(requests):
            self.paused = True
            try:
                yield output
            finally:
                self.paused = False


class TakesTurns(Rewritten):
    """A call that begins while two others run waits for one of them."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.turns = asyncio.Semaphore(2)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async with self.turns:
            async for output in super().generate(requests):
                yield output


class RunsMore(TransformersRolloutEngine):
    """`max_running` applies to each call."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, max_running=3 * spec.max_running))


class LooksWait(TransformersRolloutEngine):
    """Reading the count waits until an update has ended."""

    def num_decoded(self) -> int:
        with self.lock:
            return super().num_decoded()


class NeverTurns(TransformersRolloutEngine):
    """A whole call is decoded before the event loop runs other tasks."""

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
    """The caller's own list is sorted by prompt."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        requests.sort(key=lambda request: -len(request.prompt_ids))  # type: ignore[attr-defined]
        async for output in super().generate(requests):
            yield output


class RefusesLate(TransformersRolloutEngine):
    """Requests are checked only when they are admitted."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        for request in requests:
            check_requests([request], max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary)
            async for output in super().generate([request]):
                yield output


class PausesAtHome(TransformersRolloutEngine):
    """`pause` from another thread is ignored."""

    def pause(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super().pause()


class OtherErrors(TransformersRolloutEngine):
    """Requests that cannot be served raise the error of the library that noticed it."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        try:
            super().initialize(ctx, spec)
        except ConfigError as error:
            raise OSError(str(error)) from error


class SortedAtTheEnd(Rewritten):
    """Samples are returned when the last one has ended, short ones first."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        outputs = [output async for output in super().generate(requests)]
        for output in sorted(outputs, key=lambda output: len(output.token_ids)):
            yield output


class GroupsAtOnce(Patched):
    """Samples are held back until all n of their request are done."""

    async def generate(self, requests):
        held = {request.request_id: [] for request in requests}
        sizes = {request.request_id: request.n for request in requests}
        async with aclosing(super().generate(requests)) as outputs:
            async for output in outputs:
                group = held[output.request_id]
                group.append(output)
                if len(group) == sizes[output.request_id]:
                    for sample in group:
                        yield sample


class EightStepsATurn(Patched):
    """Eight decoding steps per turn of the event loop."""

    def _step(self):
        for _ in range(8):
            super()._step()


class SlotsPerCall(Patched):
    """`max_running` applies to each call of `generate`, not to all together."""

    def _step(self):
        if hasattr(self, "decoder"):
            calls = {id(job.call) for job in list(self.decoder.jobs.values())}
            self.decoder.max_running = self.spec.max_running * max(len(calls), 1)
        super()._step()


class LeftWhilePaused(Patched):
    """A call that is abandoned while the engine is paused keeps its slots."""

    async def generate(self, requests):
        call = Call()
        with self.lock:
            check_requests(requests, max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary)
            self.decoder.submit([self._job(call, request, at) for at, request in enumerate(requests)])
            self.num_calls += 1
        try:
            while call.left or call.finished:
                self._step()
                for output in call.take():
                    yield output
                await asyncio.sleep(PAUSED_S if self.paused else 0)
        finally:
            with self.lock:
                if call.error is None and not self.paused:
                    self.decoder.withdraw(call)


class QueuedBeforeChecked(Patched):
    """Requests before a refused one stay queued."""

    async def generate(self, requests):
        call = Call()
        with self.lock:
            self.num_calls += 1
            for at, request in enumerate(requests):
                check_requests(
                    requests[: at + 1], max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary
                )
                self.decoder.submit([self._job(call, request, at)])
        try:
            while call.left or call.finished:
                self._step()
                for output in call.take():
                    yield output
                await asyncio.sleep(PAUSED_S if self.paused else 0)
        finally:
            with self.lock:
                if call.error is None:
                    self.decoder.withdraw(call)
