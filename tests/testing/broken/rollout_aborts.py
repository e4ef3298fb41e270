"""Rollout engines that abort wrongly: other requests, too late, or with wrong partial samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten, SplitAbortDecoder
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"abort": "is missing"})
class AbortLoses(Rewritten):
    """Aborted samples are never returned."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput | None:
        return None if output.finish_reason is FinishReason.ABORT else output


@defect(
    {"registration.capabilities": "abort is claimed", "abort": "does not support", "event_loop": "does not support"}
)
class AbortAbsent(TransformersRolloutEngine):
    """Claims `abort`, but has the interface's default, which refuses."""

    abort = RolloutEngine.abort


@defect({"abort.slots": "samples at once afterwards"})
class SlotsLost(TransformersRolloutEngine):
    """Every abort leaks a slot."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids)
        self.decoder.max_running = max(self.decoder.max_running - 1, 1)


@defect({"abort.paused": "came in the pause"})
class AbortWaitsForResume(TransformersRolloutEngine):
    """Samples that are aborted in a pause are returned only after it."""

    def _step(self) -> None:
        if not self.paused:
            super()._step()


@defect({"abort.paused": "right behind it"})
class ResumeForgetsAborts(TransformersRolloutEngine):
    """`resume` clears the list of aborts that the loop has not read yet."""

    def resume(self, *, keep_cache: bool = False) -> None:
        if self.paused:
            self.decoder._aborts.clear()
        super().resume(keep_cache=keep_cache)


@defect({"abort.exact": "behind an abort of nothing"})
class NothingIsAll(TransformersRolloutEngine):
    """An empty list of requests to abort means all of them."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids or None)


@defect({"abort.exact": "samples that were aborted"})
class WaitingStay(TransformersRolloutEngine):
    """`abort` ends running samples, but not those that wait for a slot."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        running = {job.request.request_id for job in self.decoder.jobs.values() if job.started}
        super().abort([name for name in running if request_ids is None or name in request_ids])


@defect({"abort.exact": "0 tokens, finish reason length"})
class AbortIsLength(Rewritten):
    """A sample that was aborted without a token has finish reason 'length'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        empty = output.finish_reason is FinishReason.ABORT and not len(output.token_ids)
        return replace(output, finish_reason=FinishReason.LENGTH) if empty else output


@defect({"abort.keeps_tokens": "and not given out"})
class AbortDropsNewest(Patched):
    """An aborted sample is returned without its newest token."""

    class RunningPart(Running):
        def abort(self):
            for row in np.flatnonzero(self.table["alive"]):
                if self._job(row).aborted and self.table["made"][row] - self.table["since"][row] > 1:
                    self.table["made"][row] -= 1
            super().abort()


@defect({"abort.keeps_pause": "that ended in the pause"})
class AbortEndsThePause(TransformersRolloutEngine):
    """Aborting everything also ends a pause."""

    def abort(self, request_ids=None):
        super().abort(request_ids)
        if request_ids is None:
            self.paused = False


@defect({"events.abort": "wrong samples"})
class AbortedIndexFromZero(Patched):
    """Samples that are aborted before they have a row are numbered from 0, not from `first_sample`."""

    class DecoderPart(SplitAbortDecoder):
        def first_of(self, job):
            return 0


@defect({"abort.at_once": "float64"})
class AbortedWithoutDtypes(Patched):
    """Samples that are aborted without a token have float64 arrays."""

    class DecoderPart(SplitAbortDecoder):
        def nothing(self):
            return np.empty(0), np.empty(0)


@defect({"update.not_finite": "aborted samples"})
class AbortedUnchecked(Patched):
    """Samples that are aborted are yielded even if their logits were not finite."""

    class RunningPart(Running):
        def _finish(self, done: Any, reasons: Sequence[FinishReason]) -> None:
            if len(done) and reasons[0] is FinishReason.ABORT:
                self.log_probs[self._index(done)] = self.log_probs[self._index(done)].nan_to_num()
            super()._finish(done, reasons)
