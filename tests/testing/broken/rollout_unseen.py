"""Rollout engines of a third trial, written by somebody who had not seen a requirement: of 43, they caught 29."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import torch

from rlsdk.interfaces import Box, FinishReason, SyncReceipt, VersionRun, WeightSyncError, fingerprint
from rlsdk.kit.requests import check_requests
from rlsdk.kit.sampling import mixed_seed
from rlsdk.kit.stop_text import StopText
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.jobs import Call
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.running import PREFILL_TOKENS, RUN_COLUMNS, Running
from rlsdk.reference.transformers_rollout import PAUSED_S, TransformersRolloutEngine


class Patched(TransformersRolloutEngine):
    """Not broken: lets a subclass replace the classes of the parts inside."""

    DecoderPart: type = Decoder
    RunningPart: type = Running
    RowsPart: type = PositionedRows
    StopPart: type = StopText

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.decoder.__class__ = self.DecoderPart
        self.decoder.running.__class__ = self.RunningPart
        self.decoder.running.stop_text.__class__ = self.StopPart
        if type(self.decoder.memory) is PositionedRows:
            self.decoder.memory.__class__ = self.RowsPart


class PadIsMasked(Patched):
    """The pad token's logit is -inf: never drawn, all log-probs slightly high."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            pad = self.memory.model.config.pad_token_id
            logits = logits.clone()
            logits[:, logits.shape[1] - 1 if pad is None else pad] = -torch.inf
            super()._take(logits, first, version)


class ShortStopWindow(Patched):
    """Stop strings are looked for in the newest 12 tokens only."""

    class StopPart(StopText):
        def window(self, strings):
            return min(super().window(strings), 12)


class StopStringAtTheLimitIsLength(Patched):
    """A stop string completed by the last token there is room for is reported as length."""

    class RunningPart(Running):
        def _finish(self, done, reasons):
            reasons = list(reasons)
            for at, row in enumerate(done):
                if (
                    reasons[at] is FinishReason.STOP
                    and self.table["text"][row]
                    and (self.table["made"][row] >= self.table["limit"][row])
                ):
                    newest = int(self.tokens[int(row), int(self.table["made"][row]) - 1])
                    if newest not in self._job(row).request.sampling.stop_token_ids:
                        reasons[at] = FinishReason.LENGTH
            super()._finish(done, reasons)


class SeedMixesMaxTokens(Patched):
    """Seeded noise depends on max_tokens."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is not None:
            job.seed = mixed_seed(request.sampling.seed, request.sampling.max_tokens)
        return job


class NoiseOfTheClock(Patched):
    """Unseeded noise is keyed by the clock in whole seconds."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = mixed_seed(self.ctx.seed, self.ctx.rank, int(time.time()), at)
        return job


class GlobalGenerator(Patched):
    """Seeds of unseeded requests come from torch's global generator."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        if request.sampling.seed is None:
            job.seed = int(torch.randint(2**62, ()))
        return job


class CompactionKeepsSampling(Patched):
    """Sampling parameters do not move when finished rows are squeezed out."""

    class RunningPart(Running):
        def compact(self):
            kept, before = self.sampling, len(self.table)
            super().compact()
            if len(self.table) != before:
                self.sampling = kept.select(torch.arange(len(self.table), device=self.device))


class RecomputeForgetsWhatCame(Patched):
    """Keys made anew after an update leave response_ids out."""

    class RunningPart(Running):
        def recompute(self):
            self.compact()
            self.memory.clear()
            tokens, made = self.tokens.tolist(), self.table["made"].tolist()
            texts = [
                torch.tensor([*self._job(row).request.prompt_ids, *tokens[row][: made[row] - 1]])
                for row in range(len(self.table))
            ]
            at_once = len(texts) if self.memory.lockstep else max(PREFILL_TOKENS // max(map(len, texts)), 1)
            for at in range(0, len(texts), at_once):
                part = texts[at : at + at_once]
                _, states = self.memory.prefill(part)
                self.memory.add(
                    states, self._index(np.arange(len(part))), capacity=len(self.tokens), most=self._longest()
                )


class StalePromptsShared(Patched):
    """Resume(keep_cache=True) also keeps prompts that other samples start from."""

    class DecoderPart(Decoder):
        def keep_old(self, version):
            self.version = version


class OddEnds(Decoder):
    """Not broken: `_end_aborted` with its parts as methods."""

    def _end_aborted(self, version):
        self.running.abort()
        for job in [job for job in self.jobs.values() if job.aborted]:
            first = self.first_of(job)
            for index in range(first + job.started, first + job.request.n):
                job.finish(index, *self.nothing(), FinishReason.ABORT, VersionRun(self.version_of(job, version), 0))
            job.started = job.request.n
            del self.jobs[job.name]
        self.waiting = [job for job in self.waiting if job.pending]
        self._tidy()

    def first_of(self, job):
        return job.request.first_sample

    def nothing(self):
        return np.empty(0, np.int64), np.empty(0, np.float32)

    def version_of(self, job, version):
        return version


class AbortedIndexFromZero(Patched):
    """Samples aborted before they had a row are numbered from 0, not first_sample."""

    class DecoderPart(OddEnds):
        def first_of(self, job):
            return 0


class AbortedWithoutDtypes(Patched):
    """Samples aborted without a token have float64 arrays."""

    class DecoderPart(OddEnds):
        def nothing(self):
            return np.empty(0), np.empty(0)


class VersionOfTheQueue(Patched):
    """Tokenless samples carry the version of when they were queued."""

    class DecoderPart(OddEnds):
        def version_of(self, job, version):
            return job.queued_under

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        job.queued_under = self.version
        return job


class ARunPerResume(Patched):
    """Every resume begins a new version run, also of the same version."""

    def resume(self, *, keep_cache=False):
        with self.lock:
            running = self.decoder.running
            table = running.table
            for row in np.flatnonzero(table["alive"] & (table["made"] > table["since"])):
                name, index, version, since, made = (table[column][row].item() for column in RUN_COLUMNS)
                running.jobs[name].runs.setdefault(index, []).append(VersionRun(version, made - since))
                table["since"][row] = made
        super().resume(keep_cache=keep_cache)


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
    """Max_running holds per call of generate, not over all."""

    def _step(self):
        if hasattr(self, "decoder"):
            calls = {id(job.call) for job in list(self.decoder.jobs.values())}
            self.decoder.max_running = self.spec.max_running * max(len(calls), 1)
        super()._step()


class LeftWhilePaused(Patched):
    """A call that is left while the engine is paused keeps its slots."""

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
    """Requests in front of a refused one stay queued."""

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


class AdmitsWhilePaused(Patched):
    """A paused engine still runs prompts and draws first tokens."""

    def _step(self):
        if self.paused and hasattr(self, "decoder"):
            with self.lock, torch.inference_mode():
                if self.decoder._has_room():
                    self.decoder._admit(self.version)
                    self.num_tokens = self.decoder.running.num_drawn
        super()._step()


class FullerThanFull(Patched):
    """Kv_used counts waiting samples and passes 1."""

    def kv_used(self):
        if not hasattr(self, "decoder"):
            return None
        jobs = list(self.decoder.jobs.values())
        return sum(job.left for job in jobs) / self.spec.max_running


class HostCopyOnce(Patched):
    """Wake after the second level-1 sleep restores the first sleep's weights."""

    host = None
    level = 0

    def sleep(self, level=1):
        with self.lock:
            if level == 1 and self.level < 2 and self.host is None:
                self.host = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}
        self.level = max(level, self.level)
        super().sleep(level)

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "weights" in parts:
            if self.level == 1:
                for name, parameter in self.parameters.items():
                    parameter.data.copy_(self.host[name])
            self.level = 0


class CountsElements(Patched):
    """Coverage is one count over all tensors: a piece twice makes up for one missing."""

    def update_weights(self, shards, version):
        with self.lock, torch.no_grad():
            if self.decoder.jobs and not self.paused:
                raise WeightSyncError(f"version {version} came while requests run; end, abort or pause them")
            came = num_bytes = 0
            for shard in shards:
                parameter = self.parameters.get(shard.name)
                whole = Box.whole(self.shapes.get(shard.name, ()))
                fits = parameter is not None and len(shard.box.size) == parameter.dim()
                if not fits or shard.box.intersect(whole) != shard.box or tuple(shard.tensor.shape) != shard.box.size:
                    raise WeightSyncError(f"version {version}: {shard.name!r} is unknown or does not fit")
                parameter[shard.box.slices(whole)].copy_(shard.tensor)
                came += shard.box.numel
                num_bytes += shard.box.numel * parameter.element_size()
            if came < sum(p.numel() for p in self.parameters.values()):
                raise WeightSyncError(f"version {version}: not all tensors were covered")
            prints = {name: fingerprint(p, Box.whole(self.shapes[name])) for name, p in self.parameters.items()}
            self.version = version
        return SyncReceipt(version=version, num_tensors=len(prints), num_bytes=num_bytes, fingerprints=prints)


class BytesAsTheyCame(Patched):
    """Receipt's num_bytes in the dtype that came."""

    def update_weights(self, shards, version):
        num_bytes = 0

        def counted():
            nonlocal num_bytes
            for shard in shards:
                num_bytes += shard.tensor.numel() * shard.tensor.element_size()
                yield shard

        receipt = super().update_weights(counted(), version)
        return replace(receipt, num_bytes=num_bytes)


class SourceErrorsRenamed(Patched):
    """What the source raises comes out as WeightSyncError."""

    def update_weights(self, shards, version):
        try:
            return super().update_weights(shards, version)
        except Exception as error:
            raise WeightSyncError(f"version {version} could not be loaded: {error}") from error
