"""Rollout engines with one defect each: the reference engine, and what a hurried author might get wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlsdk.interfaces import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
    SyncReceipt,
    VersionRun,
    WeightShard,
    fingerprint,
)
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine

MIB = 2**20


class Rewritten(TransformersRolloutEngine):
    """Changes requests on the way in, or samples on the way out."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return request

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput | None:
        return output

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        known = {request.request_id: request for request in requests}
        stream = super().generate([self.asked(request) for request in requests])
        async for output in stream:
            changed = self.given(known[output.request_id], output)
            if changed is not None:
                yield changed


class BeforeTemperature(Rewritten):
    """Log-probs are of the logits before they are divided by the temperature."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature in (0, 1):
            return output
        return replace(output, log_probs=self.log_probs(request.prompt_ids, output, lambda logits: logits))

    def log_probs(self, prompt: Sequence[int], output: GenerationOutput, change: Any) -> Any:
        tokens = output.token_ids.tolist()
        with torch.no_grad():
            logits = self.plain(torch.tensor([[*prompt, *tokens]]))[len(prompt) - 1 : -1]
        return change(logits).log_softmax(-1)[range(len(tokens)), tokens].numpy().astype(np.float32)

    def plain(self, row: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=row, use_cache=False).logits[0].float()
        return logits


class AfterFilters(BeforeTemperature):
    """Log-probs are of what top-k left, scaled to 1."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        top_k = request.sampling.top_k
        if not top_k or request.sampling.temperature != 1:
            return output

        def cut(logits: torch.Tensor) -> torch.Tensor:
            return logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)

        return replace(output, log_probs=self.log_probs(request.prompt_ids, output, cut))


class StopTokenDropped(Rewritten):
    """The stop token that ended a response is not part of it."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or not request.sampling.stop_token_ids:
            return output
        return replace(output, token_ids=output.token_ids[:-1], log_probs=output.log_probs[:-1])


class StopsByItself(Rewritten):
    """The model's end-of-sequence token ends a response, asked for or not."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.eos = self.model.config.eos_token_id

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        stops = {*request.sampling.stop_token_ids, self.eos}
        return replace(request, sampling=replace(request.sampling, stop_token_ids=tuple(stops)))


class SeedIgnored(Rewritten):
    """Every call is new, seeded or not."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, seed=None))


class SeedForAll(Rewritten):
    """Without a seed, every call draws the same."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        return replace(request, sampling=replace(request.sampling, seed=0 if seed is None else seed))


class RowsSwapped(Rewritten):
    """When there are more samples than slots, two requests get each other's."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        crowded = sum(request.n for request in requests) > self.spec.max_running and len(requests) > 4
        names = (
            {requests[0].request_id: requests[1].request_id, requests[1].request_id: requests[0].request_id}
            if (crowded)
            else {}
        )
        async for output in super().generate(requests):
            yield replace(output, request_id=names.get(output.request_id, output.request_id))


class OneSampleTwice(Rewritten):
    """The first sample of a request of five comes in place of the last."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, sample_index=0) if request.n == 5 and output.sample_index == 4 else output


class PromptCut(Rewritten):
    """Prompts of more than 100 tokens lose their beginning without a word."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        return replace(request, prompt_ids=ids[-100:]) if self.spec.max_model_tokens - 1 == len(ids) else request

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(request.prompt_ids) != self.spec.max_model_tokens - 1:
            return output
        one = {"token_ids": output.token_ids[:1], "log_probs": output.log_probs[:1]}
        return replace(output, finish_reason=FinishReason.LENGTH, **one)


class OneTokenShort(Rewritten):
    """A response of nine tokens ends after eight: silent truncation."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.max_tokens != 9 or len(output.token_ids) != 9 or request.n != 2:
            return output
        return replace(output, token_ids=output.token_ids[:8], log_probs=output.log_probs[:8])


class NarrowTopP(Rewritten):
    """Top-p keeps less than was asked for."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, top_p=request.sampling.top_p**2))


class FlatDraws(Rewritten):
    """Tokens are drawn at another temperature than was asked for, and their log-probs are right all the same."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        plain = requests[0].sampling if requests else None
        many = plain is not None and plain.max_tokens == 1 and requests[0].n > 100 and plain.top_k == 0
        async for output in super().generate(requests):
            if many and output.sample_index % 10 == 0:
                first = await self.best_prompts(requests[0])
                yield replace(output, token_ids=first)
            else:
                yield output

    async def best_prompts(self, request: GenerationRequest) -> Any:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([request.prompt_ids]), use_cache=False).logits[0, -1]
        return np.array([int(logits.argmax())])


class GreedyIsWarm(Rewritten):
    """Temperature 0 is taken for a very low one, and the log-prob is of that."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature:
            return output
        return replace(output, log_probs=np.zeros_like(output.log_probs))


class MinPIgnored(Rewritten):
    """Claims min-p and does not read it."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, min_p=0.0))


class StopStringsIgnored(Rewritten):
    """Claims stop strings and does not read them."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_strings=()))


class NothingRefused(Rewritten):
    """A prompt that does not fit is cut to what does."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, prompt_ids=request.prompt_ids[: self.spec.max_model_tokens - 1] or (5,))


class AbortLoses(Rewritten):
    """Aborted samples are never given out."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput | None:
        return None if output.finish_reason is FinishReason.ABORT else output


class AbortAbsent(TransformersRolloutEngine):
    """Claims `abort`, and has the interface's, which refuses."""

    abort = RolloutEngine.abort


class OldVersion(Rewritten):
    """Samples carry version 0 for ever."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return (
            replace(output, versions=(VersionRun(0, len(output.token_ids)),))
            if len(request.prompt_ids) == 5
            else output
        )


class OneTensorNeverUpdated(TransformersRolloutEngine):
    """Fingerprints are of what arrived; one bias keeps its old values."""

    STUCK = "model.layers.0.self_attn.v_proj.bias"

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        arrived: dict[str, int] = {}

        def heard() -> Any:
            for shard in shards:
                if tuple(shard.tensor.shape) == shard.box.size:
                    arrived[shard.name] = arrived.get(shard.name, 0) + fingerprint(shard.tensor.float(), shard.box)
                yield shard

        # Memory that no weights have come to yet may hold anything.
        old = self.parameters[self.STUCK].clone().nan_to_num(0.5, 0.5, 0.5).clamp(-1, 1)
        try:
            receipt = super().update_weights(heard(), version)
        finally:
            self.parameters[self.STUCK].copy_(old)
        return replace(receipt, fingerprints={name: value % 2**32 for name, value in arrived.items()})


class StaleCache(Rewritten):
    """What was generated for a long prompt is remembered, across updates too."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.remembered: dict[Any, GenerationOutput] = {}

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(request.prompt_ids) < 64 or output.finish_reason is FinishReason.ABORT:
            return output
        key = request.prompt_ids, request.sampling, output.sample_index
        old = self.remembered.setdefault(key, output)
        return replace(old, versions=output.versions)


class NeverRecovers(TransformersRolloutEngine):
    """Once an update has failed, those after it leave one bias as it was in the beginning."""

    failed = False

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.first = self.parameters[OneTensorNeverUpdated.STUCK].clone()

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.decoder.jobs:
            return super().update_weights(shards, version)
        try:
            receipt = super().update_weights(shards, version)
        except Exception:
            self.failed = True
            raise
        if self.failed:
            self.parameters[OneTensorNeverUpdated.STUCK].copy_(self.first)
        return receipt


class TouchedThenRefused(TransformersRolloutEngine):
    """A busy engine looks at the first piece before it refuses an update."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        pieces = iter(shards)
        first = [next(pieces)]
        return super().update_weights((piece for part in (first, pieces) for piece in part), version)


class UpdatedWhileBusy(TransformersRolloutEngine):
    """Weights are written under running samples, which keep the version and the cache they began with."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        busy = bool(self.decoder.jobs) and not self.paused
        if not busy:
            return super().update_weights(shards, version)
        self.paused = True
        old = self.version
        receipt = super().update_weights(shards, version)
        self.paused, self.version = False, old
        return receipt


class CacheKeptOverPause(TransformersRolloutEngine):
    """Keys and values that were made before a pause are read after an update."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        if self.paused:
            self.decoder.version = version
        return receipt


class PauseAborts(TransformersRolloutEngine):
    """`pause` ends what runs."""

    def pause(self) -> None:
        if self.decoder.jobs and len(next(iter(self.decoder.jobs.values())).request.prompt_ids) == 5:
            self.abort()
        super().pause()


class WakesEmpty(TransformersRolloutEngine):
    """Level 1 keeps no weights on the host, and `wake` serves whatever the memory holds."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" in parts:
            for parameter in self.parameters.values():
                parameter.zero_()


class OldWeightsAwake(TransformersRolloutEngine):
    """The weights of before `sleep` come back with the key-value cache, over those of an update between."""

    def sleep(self, level: int = 1) -> None:
        self.kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        super().sleep(level)

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "kv_cache" in parts and "weights" not in parts:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.kept[name])


class GroupNumbered(Rewritten):
    """`first_sample` is only a number: the randomness is that of the place in the request."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, first_sample=0)

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, sample_index=request.first_sample + output.sample_index)


class GivenAgain(Rewritten):
    """Tokens that the response has are given out with the new ones."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        count = len(request.response_ids)
        return replace(
            output,
            token_ids=np.concatenate([np.array(request.response_ids, np.int64), output.token_ids]),
            log_probs=np.concatenate([np.zeros(count, np.float32), output.log_probs]),
        )


class GivenUncounted(Rewritten):
    """`max_tokens` are new ones, whatever the response has."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        more = request.sampling.max_tokens + len(request.response_ids)
        return replace(request, sampling=replace(request.sampling, max_tokens=more))


class SeedRestarts(Rewritten):
    """What the response has becomes part of the prompt: noise begins again behind it, and stop strings too."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if not 0 < len(request.response_ids) < request.sampling.max_tokens:
            return request
        left = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(request.response_ids))
        prompt = (*request.prompt_ids, *request.response_ids)
        return replace(request, prompt_ids=prompt, response_ids=(), sampling=left)


class FirstAndLastVersion(Rewritten):
    """All but the last token are said to be of the first version."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        first, last = output.policy_version, output.last_policy_version
        if first == last:
            return output
        return replace(output, versions=(VersionRun(first, len(output.token_ids) - 1), VersionRun(last, 1)))


class RunsBeyondTokens(Rewritten):
    """The prompt's tokens are counted as the first version's."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        first, *others = output.versions
        return replace(output, versions=(replace(first, num_tokens=first.num_tokens + 1), *others))


class CountsCalls(TransformersRolloutEngine):
    """Tokens are counted when their call has ended."""

    counted = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async for output in super().generate(requests):
            yield output
        self.counted = self.num_tokens

    def num_decoded(self) -> int:
        return self.counted


class OneCallAtATime(Rewritten):
    """A call waits until the one before it has ended."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.turn = asyncio.Lock()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async with self.turn:
            async for output in super().generate(requests):
                yield output


class LoopOfItsOwn(TransformersRolloutEngine):
    """`sleep` runs an event loop, which it cannot inside of another."""

    def sleep(self, level: int = 1) -> None:
        async def work() -> None:
            TransformersRolloutEngine.sleep(self, level)

        coroutine = work()
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()


class Leaks(Rewritten):
    """Two MiB of every call are kept."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.kept: list[bytearray] = []

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.kept.append(bytearray(b"x" * 2 * MIB))
        return request


class LeavesProcess(TransformersRolloutEngine):
    """A helper of each engine outlives it."""

    left: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def close(self) -> None:
        if hasattr(self, "model"):
            self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        super().close()
