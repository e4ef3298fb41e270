"""Collects the samples of a group: records them as they arrive, orders them, and delivers the complete group."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlsdk.interfaces import ToolUse, Turn
from rlsdk.rollouts.groups.begun import Begun
from rlsdk.rollouts.groups.group import Group, GroupTask, Sample
from rlsdk.rollouts.schedule.events import Sampled

GREEDY = "greedy"
"""Name of the requests for greedy baselines."""
Deliver = Callable[[Sample | BaseException], None]
"""Receives a sample, or the error that ended the rollout of its group."""
Inbox = queue.SimpleQueue[Any]
"""Receives groups, or the error that ended their rollout."""
Made = Mapping[tuple[str, int], Sample]
"""Samples of a group that exist already, by name of their requests and index."""
Unfinished = Mapping[tuple[str, int], Begun]
"""What unfinished samples of a group have already, by name of their requests and index."""


class Record(Protocol):
    """Receives finished samples, on the stream's thread."""

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        """Records a graded sample, with the name of its requests."""
        ...

    def turn(self, task: GroupTask, name: str, index: int, key: str, turn: Turn) -> None:
        """Records a turn of a sample that is not finished, with the key of its call."""
        ...

    def tool(self, task: GroupTask, name: str, index: int, call: int, use: ToolUse) -> None:
        """Records a call of a tool of such a sample, with its number in the episode."""
        ...

    def flush(self) -> None:
        """Writes the recorded samples and turns; called after samples that arrived together.

        Raises:
            OutputError: they cannot be written.
        """
        ...


class Recording:
    """Writes the samples of one turn of the event loop together, and delivers a group once all its samples are
    written."""

    def __init__(self, record: Record, into: Inbox) -> None:
        """`into` receives the error of a failed write (a full disk)."""
        self._record = record
        self._into = into
        self._is_due = False
        self._groups: list[Group] = []
        """Complete groups that are not written yet."""

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        self._record.sample(task, name, index, sample)
        self._flush_soon()

    def turn(self, task: GroupTask, name: str, index: int, key: str, turn: Turn) -> None:
        self._record.turn(task, name, index, key, turn)
        self._flush_soon()

    def tool(self, task: GroupTask, name: str, index: int, call: int, use: ToolUse) -> None:
        self._record.tool(task, name, index, call, use)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def deliver(self, group: Group) -> None:
        """Delivers a group after its samples are written, so that a delivered group survives a kill of this process."""
        if self._is_due:
            self._groups.append(group)
        else:
            self._into.put(group)

    def _flush(self) -> None:
        self._is_due = False
        groups, self._groups = self._groups, []
        try:
            self._record.flush()
        except Exception as error:  # the event loop would only log it, and the run would wait for these groups
            self._into.put(error)
            return
        for group in groups:
            self._into.put(group)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Where groups that were started together are delivered."""

    into: Inbox
    recording: Recording | None
    made: Mapping[int, Made]
    begun: Mapping[int, Unfinished] = field(default_factory=dict)
    """Ordinal of a group -> what its unfinished samples have already."""
    reports_sampled: bool = False
    """`into` receives a `Sampled` when the last token of a group was drawn, too."""


class GroupAssembly:
    """Collects the samples of one group."""

    def __init__(self, task: GroupTask, delivery: Delivery) -> None:
        """The group, or the error that ended it, is delivered once."""
        self._task = task
        self._done = delivery.into.put
        self._recording = delivery.recording
        self._deliver = self._done if self._recording is None else self._recording.deliver
        self._samples: dict[int, Sample] = {}
        self._baseline: Sample | None = None
        self._left = task.num_samples + task.greedy_baseline
        self._unsampled = self._left if delivery.reports_sampled else 0

    def sampled(self) -> None:
        """Counts a sample whose last token was drawn."""
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
        """As `take`, for a sample that is already recorded."""
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
