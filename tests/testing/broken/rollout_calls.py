"""Rollout engines that handle calls wrongly: concurrency, streaming, cancellation, validation, event loop, threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, RankContext, RolloutSpec
from rlsdk.kit.generation.requests import check_requests
from rlsdk.reference.jobs import Call
from rlsdk.reference.transformers_rollout import PAUSED_S, TransformersRolloutEngine


@defect({"continuous_batching": "before a long one that had begun"})
class OneCallAtATime(Rewritten):
    """A call waits until the previous one has ended."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.turn = asyncio.Lock()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async with self.turn:
            async for output in super().generate(requests):
                yield output


@defect({"streaming": "behind a long one"})
class AllAtTheEnd(Rewritten):
    """Samples are returned when the last one has ended."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        outputs = [output async for output in super().generate(requests)]
        for output in sorted(outputs, key=lambda output: -len(output.token_ids)):
            yield output


@defect({"torch_modes": "gradients"})
class NoGradient(Rewritten):
    """Gradients are disabled while `generate` waits for its caller."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        with torch.no_grad():
            async for output in super().generate(requests):
                yield output


@defect({"batch_invariance.request_ids": "empty"})
class NothingFails(Rewritten):
    """A call without requests raises an error."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        longest = max(len(request.prompt_ids) for request in requests)
        assert longest
        async for output in super().generate(requests):
            yield output


@defect({"abandoned": "arrived while"})
class NeverWithdraws(TransformersRolloutEngine):
    """An abandoned call continues as soon as another one steps the engine."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.decoder.withdraw = lambda call: None  # type: ignore[method-assign]


@defect({"slow_caller": ""})
class SlowCallersHold(TransformersRolloutEngine):
    """Nothing is decoded for one call while another call's caller processes a sample."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async for output in super().generate(requests):
            self.paused = True
            try:
                yield output
            finally:
                self.paused = False


@defect({"batch_invariance.staggered_calls": "before long ones"})
class TakesTurns(Rewritten):
    """A call that begins while two others run waits for one of them."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.turns = asyncio.Semaphore(2)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async with self.turns:
            async for output in super().generate(requests):
                yield output


@defect({"max_running": "samples at once, one call"})
class RunsMore(TransformersRolloutEngine):
    """`max_running` applies to each call."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, max_running=3 * spec.max_running))


@defect({"polling_is_cheap": "that an update held up"})
class LooksWait(TransformersRolloutEngine):
    """Reading the count waits until an update has ended."""

    def num_decoded(self) -> int:
        with self.lock:
            return super().num_decoded()


@defect({"outputs.ownership": "wrong samples, call"})
class SharedTokens(Rewritten):
    """Equal tokens of different samples share one array."""

    kept: dict[bytes, Any]

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        kept = self.__dict__.setdefault("kept", {})
        return replace(output, token_ids=kept.setdefault(output.token_ids.tobytes(), output.token_ids))


@defect({"requests.ownership": "has no attribute 'sort'"})
class SortsRequests(TransformersRolloutEngine):
    """The caller's own list is sorted by prompt."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        requests.sort(key=lambda request: -len(request.prompt_ids))  # type: ignore[attr-defined]
        async for output in super().generate(requests):
            yield output


@defect({"refusals.nothing": "samples of a call with"})
class RefusesLate(TransformersRolloutEngine):
    """Requests are checked only when they are admitted."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        for request in requests:
            check_requests([request], max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary)
            async for output in super().generate([request]):
                yield output


@defect({"threads": "tokens that came in a pause"})
class PausesAtHome(TransformersRolloutEngine):
    """`pause` from another thread is ignored."""

    def pause(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super().pause()


@defect({"streaming": "when the first sample came"})
class SortedAtTheEnd(Rewritten):
    """Samples are returned when the last one has ended, short ones first."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        outputs = [output async for output in super().generate(requests)]
        for output in sorted(outputs, key=lambda output: len(output.token_ids)):
            yield output


@defect({"event_loop.turns": "turns of the event loop"})
class EightStepsATurn(Patched):
    """Eight decoding steps per turn of the event loop."""

    def _step(self):
        for _ in range(8):
            super()._step()


@defect({"max_running": "samples at once, three calls"})
class SlotsPerCall(Patched):
    """`max_running` applies to each call of `generate`, not to all together."""

    def _step(self):
        if hasattr(self, "decoder"):
            calls = {id(job.call) for job in list(self.decoder.jobs.values())}
            self.decoder.max_running = self.spec.max_running * max(len(calls), 1)
        super()._step()


@defect({"abandoned.paused": "requests are running"})
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
