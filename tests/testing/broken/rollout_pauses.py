"""Rollout engines that pause and resume wrongly, or keep a KV cache that they must recompute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from broken.rollout_base import Patched
from rlsdk.interfaces import SyncReceipt, VersionRun, WeightShard
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.running import PREFILL_TOKENS, RUN_COLUMNS, Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


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


class PauseLetsIn(TransformersRolloutEngine):
    """A call that begins in a pause is run."""

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
    """Pausing twice wants two `resume`; one that comes alone pauses the next."""

    depth = 0

    def pause(self) -> None:
        self.depth += 1
        super().pause()

    def resume(self) -> None:
        self.depth -= 1
        self.paused = self.depth != 0


class CacheNeverKept(TransformersRolloutEngine):
    """What is to go on with old keys and values has them computed anew."""

    def resume(self, *, keep_cache: bool = False) -> None:
        super().resume()


class AbortInAPauseKeepsKeys(TransformersRolloutEngine):
    """An update behind an abort in the same pause leaves the others' keys and values of the old weights."""

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
    """Nothing runs, so there is nothing to pause."""

    def pause(self) -> None:
        if self.decoder.jobs:
            super().pause()


class KeptForGood(Patched):
    """A sample that went on with its keys and values once does so behind every later pause."""

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
    """Samples that go on behind a pause have lost their temperature and filters."""

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


class AdmitsWhilePaused(Patched):
    """A paused engine still runs prompts and draws first tokens."""

    def _step(self):
        if self.paused and hasattr(self, "decoder"):
            with self.lock, torch.inference_mode():
                if self.decoder._has_room():
                    self.decoder._admit(self.version)
                    self.num_tokens = self.decoder.running.num_drawn
        super()._step()
