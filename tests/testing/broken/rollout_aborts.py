"""Rollout engines that abort wrongly: other requests, too late, or with wrong partial samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from broken.rollout_base import Patched, Rewritten, SplitAbortDecoder
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class AbortLoses(Rewritten):
    """Aborted samples are never returned."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput | None:
        return None if output.finish_reason is FinishReason.ABORT else output


class AbortAbsent(TransformersRolloutEngine):
    """Claims `abort`, but has the interface's default, which refuses."""

    abort = RolloutEngine.abort


class SlotsLost(TransformersRolloutEngine):
    """Every abort leaks a slot."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids)
        self.decoder.max_running = max(self.decoder.max_running - 1, 1)


class AbortWaitsForResume(TransformersRolloutEngine):
    """Samples that are aborted in a pause are returned only after it."""

    def _step(self) -> None:
        if not self.paused:
            super()._step()


class ResumeForgetsAborts(TransformersRolloutEngine):
    """`resume` clears the list of aborts that the loop has not read yet."""

    def resume(self, *, keep_cache: bool = False) -> None:
        if self.paused:
            self.decoder._aborts.clear()
        super().resume(keep_cache=keep_cache)


class NothingIsAll(TransformersRolloutEngine):
    """An empty list of requests to abort means all of them."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids or None)


class AbortSpeaksOfNext(TransformersRolloutEngine):
    """An abort that finds nothing to end is applied to later requests."""

    pending = False

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.pending = self.pending or (request_ids is None and not self.decoder.jobs)
        super().abort(request_ids)

    def _step(self) -> None:
        if self.pending and self.decoder.jobs:
            self.pending = False
            super().abort()
        super()._step()


class WaitingStay(TransformersRolloutEngine):
    """`abort` ends running samples, but not those that wait for a slot."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        running = {job.request.request_id for job in self.decoder.jobs.values() if job.started}
        super().abort([name for name in running if request_ids is None or name in request_ids])


class AbortIsLength(Rewritten):
    """A sample that was aborted without a token has finish reason 'length'."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        empty = output.finish_reason is FinishReason.ABORT and not len(output.token_ids)
        return replace(output, finish_reason=FinishReason.LENGTH) if empty else output


class AbortedShort(Rewritten):
    """An aborted sample lacks its last token, but has its log-prob."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.ABORT or len(output.token_ids) < 2:
            return output
        return replace(output, token_ids=output.token_ids[:-1])


class CountFalls(TransformersRolloutEngine):
    """An abort subtracts its tokens from the count."""

    taken = 0

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort(request_ids)
        self.taken += 10_000

    def num_decoded(self) -> int:
        return self.num_tokens - self.taken


class AbortsNewest(TransformersRolloutEngine):
    """With two calls of the same id, `abort` ends only one."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is None:
            return super().abort(None)
        jobs = [job for job in self.decoder.jobs.values() if job.request.request_id in request_ids]
        newest = max((job.name for job in jobs), default=-1)
        for job in jobs:
            if job.call is not self.decoder.jobs[newest].call:
                job.request = replace(job.request, request_id=job.request.request_id + "\0")
        return super().abort(request_ids)


class AbortTakesOneMore(Patched):
    """Abort takes effect one decoding step later."""

    class DecoderPart(Decoder):
        def step(self, version):
            held, self._aborts = self._aborts, type(self._aborts)()
            super().step(version)
            self._aborts.extendleft(reversed(held))
            self.leave_aborted(version)


class AbortDropsNewest(Patched):
    """An aborted sample is returned without its newest token."""

    class RunningPart(Running):
        def abort(self):
            for row in np.flatnonzero(self.table["alive"]):
                if self._job(row).aborted and self.table["made"][row] - self.table["since"][row] > 1:
                    self.table["made"][row] -= 1
            super().abort()


class AbortEndsThePause(TransformersRolloutEngine):
    """Aborting everything also ends a pause."""

    def abort(self, request_ids=None):
        super().abort(request_ids)
        if request_ids is None:
            self.paused = False


class AbortsInAWhile(TransformersRolloutEngine):
    """`abort` takes effect some steps later."""

    left = -1
    ids: Sequence[str] | None = None

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.left, self.ids = 30, request_ids

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0 or (self.paused and self.left > 0):
            self.left = -1
            super().abort(self.ids)
        super()._step()


class WideIndices(Rewritten):
    """The index of an aborted sample is a numpy integer."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.ABORT:
            return output
        return replace(output, sample_index=np.int64(output.sample_index))  # type: ignore[arg-type]


class AbortsByBeginning(TransformersRolloutEngine):
    """`abort` ends every request whose id has the prefix of a named one."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is not None:
            held = [job.request.request_id for job in list(self.decoder.jobs.values())]
            request_ids = [*request_ids, *(n for n in held if n.startswith(tuple(request_ids)) and request_ids)]
        super().abort(request_ids)


class UnknownIsAnError(TransformersRolloutEngine):
    """Aborting a request that has already ended raises a KeyError."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        held = {job.request.request_id for job in list(self.decoder.jobs.values())}
        if request_ids is not None and not held.issuperset(request_ids):
            raise KeyError(sorted({*request_ids} - held))
        super().abort(request_ids)


class AbortedIndexFromZero(Patched):
    """Samples that are aborted before they have a row are numbered from 0, not from `first_sample`."""

    class DecoderPart(SplitAbortDecoder):
        def first_of(self, job):
            return 0


class AbortedWithoutDtypes(Patched):
    """Samples that are aborted without a token have float64 arrays."""

    class DecoderPart(SplitAbortDecoder):
        def nothing(self):
            return np.empty(0), np.empty(0)


class LeavingAbortsNamesakes(TransformersRolloutEngine):
    """A call that is abandoned aborts its requests by their ids, and so those of other calls with the same ids."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        left = {(request.request_id, request.first_sample + at) for request in requests for at in range(request.n)}
        try:
            async with aclosing(super().generate(requests)) as stream:
                async for output in stream:
                    left.discard((output.request_id, output.sample_index))
                    yield output
        finally:
            if left:
                self.abort([name for name, _ in left])


class AbortedUnchecked(Patched):
    """Samples that are aborted are yielded even if their logits were not finite."""

    class RunningPart(Running):
        def _finish(self, done: Any, reasons: Sequence[FinishReason]) -> None:
            if len(done) and reasons[0] is FinishReason.ABORT:
                self.log_probs[self._index(done)] = self.log_probs[self._index(done)].nan_to_num()
            super()._finish(done, reasons)
