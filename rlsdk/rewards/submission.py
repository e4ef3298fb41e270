"""Samples that are graded together: encoded once, cut into tasks, and what came of them."""

from __future__ import annotations

import bisect
import json
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsdk.interfaces import DataError, RewardSample
from rlsdk.rewards.definitions import EXAMPLES_PER_KIND, FailureExample, FailureKind, RewardDef, RewardResult
from rlsdk.rewards.protocol import NONCE_BYTES, Record, Tag, encode_message

MAX_ATTEMPTS = 3
"""At an item whose process is ended from outside."""


@dataclass(eq=False)
class Task:
    """Items that one process grades, in order."""

    submission: Submission
    items: Sequence[tuple[int, int]]
    """(index of the reward, index of the sample)."""
    together: bool = False
    """One call of a batched function for all of them."""
    attempts: int = 1
    """How often the first of its items was begun."""
    graded: int = 0
    """Items whose record has come."""
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))

    @property
    def rest(self) -> Sequence[tuple[int, int]]:
        return self.items[self.graded :]

    def encode(self) -> bytes:
        """As a message, with prompt, answer and row of each prompt sent once however many samples it has."""
        samples = self.submission.samples
        contexts: dict[int, int] = {}
        responses: dict[int, int] = {}
        items = []
        for reward, at in self.items:
            contexts.setdefault(self.submission.context_of[at], len(contexts))
            items.append((reward, responses.setdefault(at, len(responses))))
        header = {
            "nonce": self.nonce.hex(),
            "together": self.together,
            "items": items,
            "samples": [
                (
                    contexts[self.submission.context_of[at]],
                    samples[at].response,
                    samples[at].truncated,
                    self.submission.extras[at],
                )
                for at in responses
            ],
        }
        return encode_message(header, [self.submission.contexts[at] for at in contexts])


class Submission:
    """One `submit` call: values and failures of its items as they come, and the future of the whole."""

    def __init__(self, rewards: Sequence[RewardDef], samples: Sequence[RewardSample]) -> None:
        """Raises `DataError` for a row, or for what a rollouter handed over, that holds more than JSON types."""
        self.rewards = rewards
        self.samples = samples
        self.future: Future[RewardResult] = Future()
        self.contexts: list[bytes] = []
        """Prompt, answer and row, as JSON; each once."""
        self.context_of = _encode_contexts(samples, self.contexts)
        self.extras = [_encode_extra(sample.extra) for sample in samples]
        """Of each sample, as JSON; empty where the rollouter handed nothing over."""
        self.queue: deque[Task] = deque()
        """Not yet handed out."""
        self.left = len(rewards) * len(samples)
        """Items without value or failure."""
        self.is_queued = False
        self.deadline = float("inf")
        """Set when its first task is handed out."""
        self.losses_in_a_row = 0
        self.notices: list[str] = []
        self._values = np.zeros((len(rewards), len(samples)))
        self._graded = np.zeros((len(rewards), len(samples)), dtype=np.bool_)
        self._failures: Counter[str] = Counter()
        self._examples: dict[tuple[FailureKind, int], list[tuple[int, str]]] = {}
        """(sample, message) of the first few samples of each kind and reward, whatever order they came in."""

    def book(self, item: tuple[int, int], record: Record) -> None:
        """Takes an item's value or failure."""
        if record.tag is Tag.VALUE:
            self._values[item] = record.value
            self._graded[item] = True
            self.losses_in_a_row = 0
            self.left -= 1
        elif record.body is not None:
            self.fail(item, FailureKind(record.body["kind"]), str(record.body["message"]))

    def fail(self, item: tuple[int, int], kind: FailureKind, message: str) -> None:
        """The item has no value."""
        self.left -= 1
        self._failures[kind.value] += 1
        reward, sample = item
        shown = self._examples.setdefault((kind, reward), [])
        bisect.insort(shown, (sample, message))
        del shown[EXAMPLES_PER_KIND:]

    def result(self) -> RewardResult:
        """The sums."""
        weights = np.array([reward.weight for reward in self.rewards])
        valid = self._graded[weights != 0].all(axis=0)
        scores = np.where(valid, weights @ self._values, 0.0)
        names = [reward.name for reward in self.rewards]
        return RewardResult(
            scores=scores.astype(np.float32),
            valid=valid,
            by_reward=dict(zip(names, self._values.astype(np.float32), strict=True)),
            graded=dict(zip(names, self._graded, strict=True)),
            failures=self._failures,
            examples=self._examples_in_order(),
            notices=tuple(self.notices),
        )

    def _examples_in_order(self) -> tuple[FailureExample, ...]:
        found = sorted(
            (sample, reward, kind, message)
            for (kind, reward), shown in self._examples.items()
            for sample, message in shown
        )
        return tuple(
            FailureExample(kind=kind, reward=self.rewards[reward].name, sample=sample, message=message)
            for sample, reward, kind, message in found
        )

    def enqueue(self, batched: Sequence[bool]) -> None:
        """A task per batched reward, and one of all other items, which `next_task` cuts."""
        self.is_queued = True
        samples = range(len(self.samples))
        for reward, together in enumerate(batched):
            if together and samples:
                self.queue.append(Task(self, [(reward, at) for at in samples], together=True))
        items = [(reward, at) for reward, together in enumerate(batched) if not together for at in samples]
        if items:
            self.queue.append(Task(self, items))

    def next_task(self, num_workers: int, seconds_per_item: float) -> Task:
        """The front of the queue, cut so that workers finish together and others get their turn."""
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
"""Work that is worth a message of its own."""
_MAX_TASK_S = 0.25


def _encode_contexts(samples: Sequence[RewardSample], contexts: list[bytes]) -> list[int]:
    """Fills `contexts`; which of them each sample has."""
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
