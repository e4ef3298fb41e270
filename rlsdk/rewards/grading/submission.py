"""One submission of samples: encodes samples once, splits them into tasks, and collects results."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlsdk.interfaces import DataError, RewardSample
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.grading.protocol import NONCE_BYTES, Record, Tag, encode_message
from rlsdk.rewards.scores.definitions import FailureKind, RewardDef
from rlsdk.rewards.scores.results import ResultBuilder, RewardResult, name_inapplicable
from rlsdk.rewards.scores.routing import applies_to


@dataclass(eq=False)
class Task:
    """Items that one process grades in order."""

    submission: Submission
    items: Sequence[tuple[int, int]]
    """(index of the reward, index of the sample)."""
    together: bool = False
    """Whether a batched function grades them in one call."""
    attempts: int = 1
    """Number of the current attempt at its first ungraded item."""
    graded: int = 0
    """Number of items with a record."""
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))

    @property
    def rest(self) -> Sequence[tuple[int, int]]:
        return self.items[self.graded :]

    def encode(self) -> bytes:
        """Encodes the task as a message; prompt, answer and row are sent once for all samples of a prompt."""
        submission = self.submission
        samples, context_of, extras = submission.samples, submission.context_of, submission.extras
        responses = {at: place for place, at in enumerate(dict.fromkeys([at for _, at in self.items]))}
        contexts = {at: place for place, at in enumerate(dict.fromkeys([context_of[at] for at in responses]))}
        with_tokens = {at for reward, at in self.items if submission.reads_tokens[reward]}
        header = {
            "nonce": self.nonce.hex(),
            "together": self.together,
            "items": [(reward, responses[at]) for reward, at in self.items],
            "samples": [
                (
                    contexts[context_of[at]],
                    samples[at].response,
                    samples[at].truncated,
                    extras[at],
                    [int(token) for token in samples[at].response_ids] if at in with_tokens else (),
                )
                for at in responses
            ],
        }
        return encode_message(header, [self.submission.contexts[at] for at in contexts])


class Submission(ResultBuilder):
    """One `submit` call: its queue of tasks, its results so far, and its future."""

    def __init__(
        self,
        rewards: Sequence[RewardDef],
        samples: Sequence[RewardSample],
        limits: RewardLimits,
        *,
        is_whole: bool = True,
    ) -> None:
        """Raises `DataError` if a row or a sample's `extra` contains types other than those of JSON."""
        super().__init__(rewards, samples, limits)
        self.is_whole = is_whole
        self.future: Future[RewardResult] = Future()
        self.contexts: list[bytes] = []
        """Prompt, answer and row as JSON; one entry for each different combination."""
        self.context_of = _encode_contexts(samples, self.contexts)
        self.extras = [_encode_extra(sample.extra) for sample in samples]
        """Data of each sample from the rollouter as JSON; empty if there is none."""
        self.queue: deque[Task] = deque()
        """Items that are not assigned yet."""
        self.is_queued = False
        self.deadline = float("inf")
        """Deadline; set when its first task is assigned."""
        self.losses_in_a_row = 0
        self.reads_tokens: Sequence[bool] = [False] * len(rewards)

    def book(self, item: tuple[int, int], record: Record) -> None:
        """Adds a record of an item from a grading process."""
        if record.tag is Tag.FAILED and record.body is not None:
            self.fail(item, FailureKind(record.body["kind"]), str(record.body["message"]))
            return
        self.losses_in_a_row = 0
        if record.tag is Tag.RECORD and record.body is not None:
            self.take(item, **record.body)
        else:
            self.take(item, record.value)

    def result(self) -> RewardResult:
        """Returns the result; if `is_whole`, samples to which no reward applies are failures."""
        return name_inapplicable(super().result()) if self.is_whole else super().result()

    def enqueue(self, batched: Sequence[bool], reads_tokens: Sequence[bool]) -> None:
        """Creates the tasks of each batched reward, and one task with all other items, which `next_task` splits."""
        self.is_queued = True
        self.reads_tokens = reads_tokens
        most = self.limits.max_batch_samples or max(len(self.samples), 1)
        for reward, together in enumerate(batched):
            items = self._items(reward) if together else []
            for start in range(0, len(items), most):
                self.queue.append(Task(self, items[start : start + most], together=True))
        single = [item for reward, together in enumerate(batched) if not together for item in self._items(reward)]
        if single:
            self.queue.append(Task(self, single))

    def _items(self, reward: int) -> list[tuple[int, int]]:
        """Returns the items of the samples to which the reward applies."""
        rows = self.rewards[reward].rows
        return [(reward, at) for at, sample in enumerate(self.samples) if not rows or applies_to(rows, sample.row)]

    def next_task(self, num_workers: int, seconds_per_item: float) -> Task:
        """Takes the next task, sized so that workers finish together and other submissions get their turn."""
        task = self.queue.popleft()
        count = len(task.items)
        share = count if num_workers == 1 else -(-count // (2 * num_workers))
        size = max(share, int(_WORTH_SENDING_S / seconds_per_item))
        size = max(1, min(size, int(_MAX_TASK_S / seconds_per_item)))
        if task.together or size >= count:
            return task
        self.queue.appendleft(Task(self, task.items[size:]))
        return Task(self, task.items[:size], attempts=task.attempts)


_WORTH_SENDING_S = 0.002
"""Minimum seconds of work in one task, so that messages pay off."""
_MAX_TASK_S = 0.25
"""Maximum seconds of work in one task."""


def _encode_contexts(samples: Sequence[RewardSample], contexts: list[bytes]) -> list[int]:
    """Fills `contexts`; returns the index of each sample's context."""
    known: dict[tuple[int, str, str | None], int] = {}
    context_of = []
    for sample in samples:
        key = (id(sample.row), sample.prompt, sample.answer)
        if key not in known:
            known[key] = len(contexts)
            try:
                contexts.append(json.dumps([sample.prompt, sample.answer, sample.row]).encode())
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"a sample cannot be sent for grading: {error}{_bad_field(sample.row, 'its row')}"
                ) from error
        context_of.append(known[key])
    return context_of


def _encode_extra(extra: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(extra)) if extra else ""
    except (TypeError, ValueError, RecursionError) as error:
        where = _bad_field(extra, "the rollouter's Trajectory.extra")
        raise DataError(f"a sample cannot be sent for grading: {error}{where}") from error


def _bad_field(fields: Mapping[str, Any], whose: str) -> str:
    for name, value in fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return f"; field {name!r} of {whose} is a {type(value).__name__}, expected JSON types"
    return ""
