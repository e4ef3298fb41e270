"""Grading of trajectories: those that end together are decoded, submitted and delivered together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from rlsdk.interfaces import FinishReason, RewardSample, Trajectory
from rlsdk.rollouts.groups.group import Grade, GroupTask, Sample
from rlsdk.rollouts.groups.group_assembly import Deliver
from rlsdk.rollouts.groups.rollouter import TextCodec, Tokens, without_stop


class Codec(TextCodec, Protocol):
    """The part of the policy's tokenizer that the stream needs."""

    def decode_all(self, token_ids: Sequence[Tokens]) -> list[str]:
        """Many at once: much cheaper than one by one."""
        ...


class Grader(Protocol):
    """Grades samples elsewhere."""

    def submit(self, samples: Sequence[RewardSample]) -> Future[Sequence[Grade]]:
        """Submits samples; one grade per sample, however they are split into calls. Returns immediately."""
        ...


_Waiting = tuple[GroupTask, Trajectory, Deliver]
"""A trajectory to grade, and the callback for its sample."""


class Grading:
    """Decodes and submits together what finished in one turn of the loop."""

    def __init__(self, grader: Grader | None, graders: Mapping[str, Grader], codec: Codec) -> None:
        self._grader = grader
        self._graders = graders
        self._codec = codec
        self._waiting: list[_Waiting] = []
        self.pending = 0
        """Number of added samples that have no grade yet."""

    def add(self, task: GroupTask, trajectory: Trajectory, deliver: Deliver) -> None:
        """Queues a trajectory; `deliver` is called with the graded sample or the error."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((task, trajectory, deliver))
        self.pending += 1

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            self._submit(waiting)
        except Exception as error:
            self.pending -= len(waiting)
            for _, _, deliver in waiting:
                deliver(error)

    def _submit(self, waiting: Sequence[_Waiting]) -> None:
        texts = self._codec.decode_all(
            [without_stop(trajectory.response_ids, task.sampling.stop_token_ids)
             for task, trajectory, _ in waiting]
        )  # fmt: skip
        parts: dict[Grader | None, list[int]] = {}
        for at, (task, _, _) in enumerate(waiting):
            parts.setdefault(self._graders.get(task.id.source, self._grader), []).append(at)
        for grader, places in parts.items():
            self._grade(grader, [waiting[at] for at in places], [texts[at] for at in places])

    def _grade(self, grader: Grader | None, waiting: Sequence[_Waiting], texts: Sequence[str]) -> None:
        if grader is None:
            self.pending -= len(waiting)
            for (_, trajectory, deliver), text in zip(waiting, texts, strict=True):
                deliver(Sample(rows=(trajectory,), text=text, grade=Grade()))
            return
        samples = [
            RewardSample(
                prompt=task.prompt.text,
                response=text,
                answer=task.prompt.answer,
                row=task.prompt.row,
                truncated=trajectory.finish_reason is FinishReason.LENGTH,
                extra=trajectory.extra,
                response_ids=trajectory.response_ids,
            )
            for (task, trajectory, _), text in zip(waiting, texts, strict=True)
        ]
        grades = asyncio.wrap_future(grader.submit(samples))
        grades.add_done_callback(lambda done: self._graded(done, waiting, texts))

    def _graded(self, done: asyncio.Future[Sequence[Grade]], waiting: Sequence[_Waiting], texts: Sequence[str]) -> None:
        self.pending -= len(waiting)
        _deliver(done, waiting, texts)


def _deliver(
    done: asyncio.Future[Sequence[Grade]],
    waiting: Sequence[_Waiting],
    texts: Sequence[str],
) -> None:
    """Gives each sample its grade, or all of them the error."""
    if done.cancelled():
        return
    error = done.exception()
    for at, (_, trajectory, deliver) in enumerate(waiting):
        if error is not None:
            deliver(error)
        else:
            deliver(Sample(rows=(trajectory,), text=texts[at], grade=done.result()[at]))
