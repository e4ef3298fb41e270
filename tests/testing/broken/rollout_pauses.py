"""Rollout engines that pause and resume wrongly, or keep a KV cache that they must recompute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from broken.rollout_base import Patched
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, VersionRun, WeightShard
from rlsdk.kit.generation.requests import check_requests
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.jobs import Call
from rlsdk.reference.running import PREFILL_TOKENS, RUN_COLUMNS, Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class CacheKeptOverPause(TransformersRolloutEngine):
    """The KV cache from before a pause is used after an update."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        if self.paused:
            self.decoder.version = version
        return receipt


class PauseAborts(TransformersRolloutEngine):
    """`pause` ends running samples."""

    def pause(self) -> None:
        if self.decoder.jobs and len(next(iter(self.decoder.jobs.values())).request.prompt_ids) == 5:
            self.abort()
        super().pause()


class PauseLetsIn(TransformersRolloutEngine):
    """A call that begins in a pause runs."""

    def pause(self) -> None:
        super().pause()
        self.held = set(self.decoder.jobs)

    def _step(self) -> None:
        if self.paused and set(self.decoder.jobs) - self.held:
            self.paused = False
            try:
                super()._step()
            finally:
                self.paused = True
        else:
            super()._step()


class PauseCounts(TransformersRolloutEngine):
    """Two pauses need two calls of `resume`; a `resume` without a pause cancels the next pause."""

    depth = 0

    def pause(self) -> None:
        self.depth += 1
        super().pause()

    def resume(self) -> None:
        self.depth -= 1
        self.paused = self.depth != 0


class CacheNeverKept(TransformersRolloutEngine):
    """`resume(keep_cache=True)` recomputes the KV cache."""

    def resume(self, *, keep_cache: bool = False) -> None:
        super().resume()


class ResumesAreCounted(TransformersRolloutEngine):
    """An engine that was paused twice goes on after the second `resume` only."""

    depth = 0

    def pause(self) -> None:
        self.depth += 1
        super().pause()

    def resume(self, *, keep_cache: bool = False) -> None:
        self.depth = max(self.depth - 1, 0)
        if not self.depth:
            super().resume(keep_cache=keep_cache)


class AbortInAPauseKeepsKeys(TransformersRolloutEngine):
    """After an abort and an update in one pause, the other samples keep the KV cache of the old weights."""

    has_aborted = False

    def pause(self):
        self.has_aborted = False
        super().pause()

    def abort(self, request_ids=None):
        self.has_aborted = bool(self.paused)
        super().abort(request_ids)

    def update_weights(self, shards, version):
        receipt = super().update_weights(shards, version)
        if self.paused and self.has_aborted:
            self.decoder.version = version
        return receipt


class PausesWhatRuns(TransformersRolloutEngine):
    """A pause of an idle engine has no effect."""

    def pause(self) -> None:
        if self.decoder.jobs:
            super().pause()


class KeptForGood(Patched):
    """A sample that kept its KV cache once keeps it after every later pause."""

    class DecoderPart(Decoder):
        kept: frozenset[tuple[int, int]] = frozenset()

        def alive(self):
            table = self.running.table[self.running.table["alive"]]
            return frozenset(zip(table["job"].tolist(), table["index"].tolist(), strict=True))

        def keep_old(self, version):
            self.kept |= self.alive()
            super().keep_old(version)

        def _drop_old(self, version):
            alive = self.alive()
            if alive and alive <= self.kept:
                super().keep_old(version)
            else:
                super()._drop_old(version)


class PauseDropsFilters(TransformersRolloutEngine):
    """Samples that continue after a pause lose their temperature and filters."""

    def resume(self, *, keep_cache: bool = False) -> None:
        running = self.decoder.running
        held, none = running.sampling, torch.iinfo(torch.int64).max
        running.sampling = replace(
            held,
            temperature=torch.ones_like(held.temperature),
            top_k=torch.full_like(held.top_k, none),
            top_p=torch.ones_like(held.top_p),
        )
        super().resume(keep_cache=keep_cache)


class RecomputeForgetsWhatCame(Patched):
    """A KV cache that is recomputed after an update lacks `response_ids`."""

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
    """`resume(keep_cache=True)` also keeps cached prompts for other samples."""

    class DecoderPart(Decoder):
        def keep_old(self, version):
            self.version = version


class ARunPerResume(Patched):
    """Every `resume` starts a new version run, even if the version is the same."""

    def resume(self, *, keep_cache=False):
        with self.lock:
            running = self.decoder.running
            table = running.table
            for row in np.flatnonzero(table["alive"] & (table["made"] > table["since"])):
                name, index, version, since, made = (table[column][row].item() for column in RUN_COLUMNS)
                running.jobs[name].runs.setdefault(index, []).append(VersionRun(version, made - since))
                table["since"][row] = made
        super().resume(keep_cache=keep_cache)


class AdmitsWhilePaused(Patched):
    """A paused engine still runs prompts and draws first tokens."""

    def _step(self):
        if self.paused and hasattr(self, "decoder"):
            with self.lock, torch.inference_mode():
                if self.decoder._has_room():
                    self.decoder._admit(self.version)
                    self.num_tokens = self.decoder.running.num_drawn
        super()._step()


class WaitsForItsLoop(TransformersRolloutEngine):
    """Calls of a paused engine wait for an asyncio event, which `resume` sets on any thread: that does not wake the
    event loop."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        call = Call()
        with self.lock:
            check_requests(requests, max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary)
            self.decoder.submit([self._job(call, request, at) for at, request in enumerate(requests)])
            self.num_calls += 1
        self.woken = asyncio.Event()
        try:
            while call.left or call.finished:
                self.woken.clear()
                self._step()
                for output in call.take():
                    yield output
                if self.paused and call.left:
                    await self.woken.wait()
                else:
                    await asyncio.sleep(0)
        finally:
            with self.lock:
                if call.error is None:
                    self.decoder.withdraw(call)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids)
        self._wake()

    def resume(self, *, keep_cache: bool = False) -> None:
        super().resume(keep_cache=keep_cache)
        self._wake()

    def _wake(self) -> None:
        if hasattr(self, "woken"):
            self.woken.set()


class FirstTokenUnchecked(Patched):
    """The token that follows the recomputation of a KV cache is not checked for a stop."""

    class RunningPart(Running):
        resumed = False

        def recompute(self):
            super().recompute()
            self.resumed = True

        def advance(self, version):
            super().advance(version)
            self.resumed = False

        def _take(self, logits, first, version):
            own = self.sampling
            if self.resumed:
                self.sampling = replace(own, stops=torch.full_like(own.stops, -1))
            super()._take(logits, first, version)
            if self.resumed:
                self.sampling = own

        def _text_stops(self, first):
            found = super()._text_stops(first)
            return np.zeros_like(found) if self.resumed else found
