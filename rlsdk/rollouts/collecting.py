"""Collects the samples of a group: records them as they arrive, orders them, and delivers the complete group."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlsdk.rollouts.events import Sampled
from rlsdk.rollouts.group import Group, GroupTask, Sample

GREEDY = "greedy"
"""Name of the requests of greedy baselines."""
Deliver = Callable[[Sample | BaseException], None]
"""Takes a sample, or what ended the rollout of its group."""
Inbox = queue.SimpleQueue[Any]
"""Where groups are delivered, or what ended their rollout."""
Made = Mapping[tuple[str, int], Sample]
"""Samples of a group that exist already, by name of their requests and index."""


class Record(Protocol):
    """Receives finished samples, on the stream's thread."""

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        """One that was made and graded, with the name of its requests."""
        ...

    def put_down(self) -> None:
        """Called after samples that came together."""
        ...


class Recording:
    """Has what comes in one turn of the event loop put down together, and delivers a group when all of it is."""

    def __init__(self, record: Record, into: Inbox) -> None:
        """`into` receives the error where it cannot be written (a full disk)."""
        self._record = record
        self._into = into
        self._is_due = False
        self._groups: list[Group] = []
        """Whole, and not yet put down."""

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        self._record.sample(task, name, index, sample)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._put_down)

    def deliver(self, group: Group) -> None:
        """What is delivered is not lost when this process is killed."""
        if self._is_due:
            self._groups.append(group)
        else:
            self._into.put(group)

    def _put_down(self) -> None:
        self._is_due = False
        groups, self._groups = self._groups, []
        try:
            self._record.put_down()
        except OSError as error:
            self._into.put(error)
            return
        for group in groups:
            self._into.put(group)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What becomes of groups that were started together."""

    into: Inbox
    recording: Recording | None
    made: Mapping[int, Made]
    tells_sampled: bool = False
    """`into` receives a `Sampled` when the last token of a group was drawn, too."""


class CollectedGroup:
    """The samples of one group, as they come."""

    def __init__(self, task: GroupTask, delivery: Delivery) -> None:
        """The group, or what ended it, is delivered once."""
        self._task = task
        self._done = delivery.into.put
        self._recording = delivery.recording
        self._deliver = self._done if self._recording is None else self._recording.deliver
        self._samples: dict[int, Sample] = {}
        self._baseline: Sample | None = None
        self._left = task.num_samples + task.greedy_baseline
        self._unsampled = self._left if delivery.tells_sampled else 0

    def sampled(self) -> None:
        """One more sample draws no token any more."""
        self._unsampled -= 1
        if not self._unsampled:
            self._done(Sampled(self._task.ordinal))

    def take(self, name: str, index: int, sample: Sample | BaseException) -> None:
        if isinstance(sample, BaseException):
            self.fail(sample)
            return
        if self._recording is not None:
            self._recording.sample(self._task, name, index, sample)
        self.keep(name, index, sample)

    def keep(self, name: str, index: int, sample: Sample) -> None:
        """As `take`, of one that was recorded before."""
        if name == GREEDY:
            self._baseline = sample
        else:
            self._samples[index] = sample
        self._left -= 1
        if not self._left:
            samples = [self._samples[at] for at in range(self._task.num_samples)]
            self._deliver(Group(task=self._task, samples=samples, baseline=self._baseline))

    def fail(self, error: BaseException) -> None:
        """Only the first error of a group is reported."""
        if self._left > 0:
            self._left = -1
            self._done(error)
