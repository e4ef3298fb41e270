"""Rollout engines that pause and resume wrongly, or keep a KV cache that they must recompute."""

from __future__ import annotations

import numpy as np
import torch

from broken.defect import defect
from broken.rollout_base import Patched
from rlsdk.interfaces import VersionRun
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.running import PREFILL_TOKENS, RUN_COLUMNS, Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"pause": "wrong samples", "partial_rollout": "no tokens", "versions.runs": "done before they were paused"})
class PauseAborts(TransformersRolloutEngine):
    """`pause` ends running samples."""

    def pause(self) -> None:
        if self.decoder.jobs and len(next(iter(self.decoder.jobs.values())).request.prompt_ids) == 5:
            self.abort()
        super().pause()


@defect({"pause.nothing_decoded": ""})
class PauseCounts(TransformersRolloutEngine):
    """Two pauses need two calls of `resume`; a `resume` without a pause cancels the next pause."""

    depth = 0

    def pause(self) -> None:
        self.depth += 1
        super().pause()

    def resume(self) -> None:
        self.depth -= 1
        self.paused = self.depth != 0


@defect({"stale_cache": "did not go on with what they had"})
class CacheNeverKept(TransformersRolloutEngine):
    """`resume(keep_cache=True)` recomputes the KV cache."""

    def resume(self, *, keep_cache: bool = False) -> None:
        super().resume()


@defect({"pause.idle": "tokens that came in the pause"})
class PausesWhatRuns(TransformersRolloutEngine):
    """A pause of an idle engine has no effect."""

    def pause(self) -> None:
        if self.decoder.jobs:
            super().pause()


@defect({"stale_cache.pauses": "should have, kept then computed again"})
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


@defect({"events.update": "of neither"})
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


@defect({"events.keep_cache": "did not go on with what they had"})
class StalePromptsShared(Patched):
    """`resume(keep_cache=True)` also keeps cached prompts for other samples."""

    class DecoderPart(Decoder):
        def keep_old(self, version):
            self.version = version


@defect({"events.pause": "do not add up"})
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
