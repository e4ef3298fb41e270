"""Continuous batching: prompts are run once, finished rows leave, waiting samples take their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from rlsdk.interfaces import FinishReason, VersionRun
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.reference.jobs import Call, Job, JobCount, Prefilled
from rlsdk.reference.lockstep import Rows
from rlsdk.reference.prompt_scores import prompt_log_probs
from rlsdk.reference.running import Running, joins

ADMIT_SHARE = 8
"""Samples wait until one in this many rows is free: prefilling few prompts costs nearly as much as prefilling many."""


class Decoder:
    """Decodes all calls of one engine together. Use from one thread at a time; `abort` may come from any other."""

    def __init__(
        self,
        memory: Rows,
        device: torch.device,
        *,
        max_running: int,
        stop_text: StopText,
        count: JobCount | None = None,
    ) -> None:
        """`count`: shared by the decoders of one engine, so that an abort means the same calls in each."""
        self.memory, self.device, self.max_running = memory, device, max_running
        self.jobs: dict[int, Job] = {}
        """Jobs with unfinished samples."""
        self.waiting: list[Job] = []
        """Jobs whose prompt was not run yet; the last one is next."""
        self.prefilled: Prefilled | None = None
        self.running = Running(memory, device, self.jobs, stop_text)
        self.version: int | None = None
        """Version of the weights that computed the KV cache."""
        self.count = count or JobCount()
        self._aborts: deque[tuple[frozenset[str] | None, int]] = deque()
        """Calls of `abort`: which requests (None: all), and how many jobs there were."""

    def submit(self, jobs: Sequence[Job], first: int | None = None) -> None:
        """Adds jobs; every `step` works on all of them. `first`: number of the first one, where they were counted
        already."""
        # Counted before they are added, all at once: an abort applies to all of them or to none.
        first = self.count.take(len(jobs)) if first is None else first
        for name, job in enumerate(jobs, first):
            job.name, job.left = name, job.request.n
            job.call.left += job.left
            self.jobs[name] = job
        # Older calls first; of one call prompts of like length together.
        self.waiting = sorted(jobs, key=lambda job: -job.given) + self.waiting

    def abort(self, request_ids: Sequence[str] | None, before: int | None = None) -> None:
        """Ends requests (None: all) before the next pass. Does not block: the requests are resolved at that pass.
        `before`: number of jobs that it applies to; None: all so far."""
        before = self.count.value if before is None else before
        self._aborts.append((None if request_ids is None else frozenset(request_ids), before))

    def withdraw(self, call: Call) -> None:
        """Drops what is left of a call."""
        if call.left:
            for job in self.jobs.values():
                job.aborted |= job.call is call
            self._end_aborted(0)

    def fail(self, error: BaseException) -> None:
        """Ends every call with this error."""
        for job in self.jobs.values():
            job.call.error = error
        self.jobs.clear()
        self._tidy()

    def step(self, version: int) -> None:
        """Makes at most one forward pass of the model, which holds the weights of this version."""
        self.leave_aborted(version)
        if self.version != version:
            self._drop_old(version)
        if self._has_room():
            self._admit(version)
        elif self.running.num_alive:
            self.running.advance(version)
        self._tidy()

    def leave_aborted(self, version: int) -> None:
        """Ends the samples that `abort` meant, with the tokens that they have."""
        if not self._aborts:
            return
        while self._aborts:
            named, num_jobs = self._aborts.popleft()
            for job in self.jobs.values():
                job.aborted |= job.name < num_jobs and (named is None or job.request.request_id in named)
        self._end_aborted(version)

    def _end_aborted(self, version: int) -> None:
        """Ends the samples of marked jobs."""
        self.running.abort()
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        for job in [job for job in self.jobs.values() if job.aborted]:
            first = job.request.first_sample
            for index in range(first + job.started, first + job.request.n):
                job.finish(index, *nothing, FinishReason.ABORT, VersionRun(version, 0))
            job.started = job.request.n
            del self.jobs[job.name]
        self.waiting = [job for job in self.waiting if job.pending]
        if self.prefilled is not None and not any(job.pending for job in self.prefilled.jobs):
            self.prefilled = None
        self._tidy()

    def _tidy(self) -> None:
        """Frees the KV cache once there are no jobs."""
        if not self.jobs:
            self.waiting, self.prefilled = [], None
            self.running.clear()

    def keep_old(self, version: int) -> None:
        """Running rows keep their KV cache; prompts of waiting samples are run again."""
        self._drop_prompts()
        self.version = version

    def _drop_old(self, version: int) -> None:
        """Drops everything that was computed with other weights."""
        self._drop_prompts()
        if self.running.num_alive:
            self.running.recompute()
        self.version = version

    def _drop_prompts(self) -> None:
        if self.prefilled is not None:
            self.waiting += [job for job in self.prefilled.jobs if job.pending]
            self.prefilled = None

    def _pending(self) -> int:
        """Samples that are not rows yet."""
        prefilled = self.prefilled.jobs if self.prefilled is not None else []
        return sum(job.pending for job in (*self.waiting, *prefilled))

    def _has_room(self) -> bool:
        """Whether enough rows are free to start samples."""
        free = self.max_running - self.running.num_alive
        pending = self._pending()
        if self.memory.lockstep and free < self.max_running:
            return False
        return 0 < min(pending, max(self.max_running // ADMIT_SHARE, 1)) <= free

    def _admit(self, version: int) -> None:
        """Starts the next samples."""
        free = self.max_running - self.running.num_alive
        capacity = min(self.max_running, self.running.num_alive + self._pending())
        prompts = self.prefilled or self._prefill(free)
        self.running.add(prompts, prompts.counts(free), capacity=capacity, version=version)
        self.prefilled = prompts if any(job.pending for job in prompts.jobs) else None

    def _prefill(self, free: int) -> Prefilled:
        """Runs the prompts of the next jobs, as many as `free` rows can use."""
        jobs: list[Job] = []
        real = longest = num_samples = 0
        while self.waiting and num_samples < free:
            length = self.waiting[-1].given
            real, most = real + length, max(longest, length)
            if jobs and (not joins(len(jobs) + 1, real, most) or (self.memory.lockstep and length != longest)):
                break
            longest = most
            jobs.append(self.waiting.pop())
            num_samples += jobs[-1].pending
        logits, states = self.memory.prefill([torch.tensor(job.text) for job in jobs])
        for count in {job.request.prompt_log_probs for job in jobs} - {None}:
            asked = [job for job in jobs if job.request.prompt_log_probs == count]
            found = prompt_log_probs(self.memory.model, [job.text for job in asked], count or 0)
            for job, scores in zip(asked, found, strict=True):
                job.prompt_log_probs = scores
        return Prefilled(jobs, logits, states)
