"""Drives a schedule: a thread that reports every event to the state machine and executes its commands."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsdk.rollouts import Group, Publish, Published, Schedule, Snapshot, Start, Train
from rlsdk.rollouts.schedule.events import Command, Event
from rlsdk.trainer.generation.publishing import Done


@dataclass(frozen=True)
class _Begin:
    """Message: execute the schedule's first commands."""


@dataclass(frozen=True)
class _End:
    """Message: end the thread."""


@dataclass(frozen=True)
class _PauseStarts:
    """Message: hold back groups that may start (`on`), or release them."""

    on: bool


@dataclass(frozen=True)
class _SnapshotReady:
    """Message: the copy of this step's weights is complete."""

    step: int


class Work(Protocol):
    """Executes a schedule's commands. All methods but `snapshot_weights` are called on the driver's thread."""

    def record(self, item: Group | Event) -> Event:
        """Records what happened, and returns the event for the schedule."""
        ...

    def start(self, step: int, groups: Sequence[int], weights: int | None) -> None:
        """Starts these groups for this step, under the weights of step `weights` (None: those that are served); returns
        at once."""
        ...

    def train(self, step: int, groups: Sequence[int]) -> None:
        """Hands the groups of a step to the trainer."""
        ...

    def publish(self, step: int, done: Done) -> None:
        """Syncs the copied weights to every replica; may return before it is done."""
        ...

    def snapshot_weights(self, step: int) -> None:
        """Copies the current weights; returns when the copy is complete. Called on a thread of its own."""
        ...

    def snapshot_ready(self, step: int) -> None:
        """Called when the copy is complete."""
        ...

    def failed(self, error: BaseException) -> None:
        """Called with the error that ended the driver; no further command is executed."""
        ...


class ScheduleDriver:
    """Processes events from any thread, one at a time."""

    def __init__(self, schedule: Schedule, work: Work) -> None:
        """Starts nothing."""
        self.schedule = schedule
        """May be replaced until `begin`."""
        self.starts_are_paused = False
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Takes events, finished groups, and errors, which end the driver."""
        self._work = work
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._commands: deque[Command] = deque()
        self._snapshot_thread: threading.Thread | None = None
        self._after_snapshot: list[Command] = []
        """Commands that change or publish weights, and wait for the copy in progress."""
        self._paused_starts: list[Start] = []
        self._failed: BaseException | None = None

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    def begin(self) -> None:
        """Starts the thread and executes the first commands. Call once."""
        self._thread = threading.Thread(target=self._drive, name="rlsdk-schedule", daemon=True)
        self._thread.start()
        self.inbox.put(_Begin())

    def pause_starts(self, on: bool) -> None:
        """Holds back groups that would start with the newest weights (`on`), or releases them."""
        self.inbox.put(_PauseStarts(on))

    def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until the condition holds or the driver has failed; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: condition() or self._failed is not None, timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the driver; None while it runs."""
        return self._failed

    def end(self) -> None:
        """Stops taking events."""
        self.inbox.put(_End())

    def join(self) -> None:
        """Waits for the threads, after `end`."""
        for thread in (self._thread, self._snapshot_thread):
            if thread is not None:
                thread.join()

    # On the driver's thread:

    def _drive(self) -> None:
        while not isinstance(item := self.inbox.get(), _End):
            if self._failed is not None:
                continue
            try:
                with self._changed:
                    self._take(item)
                    self._changed.notify_all()
                self._execute()
            except BaseException as error:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                self._work.failed(error)

    def _take(self, item: Any) -> None:
        match item:
            case BaseException():
                raise item
            case _Begin():
                self._commands.extend(self.schedule.begin())
            case _SnapshotReady(step):
                self._work.snapshot_ready(step)
                self._snapshot_thread = None
                self._commands.extendleft(reversed(self._after_snapshot))
                self._after_snapshot.clear()
            case _PauseStarts(on):
                self.starts_are_paused = on
                if not on:
                    self._commands.extendleft(reversed(self._paused_starts))
                    self._paused_starts.clear()
            case _:
                self._commands.extend(self.schedule.handle(self._work.record(item)))

    def _execute(self) -> None:
        while self._commands:
            match self._commands.popleft():
                case Snapshot(step):
                    # On its own thread: the copy waits for a running sync, as to a restarted replica, and meanwhile the
                    # other replicas may start groups.
                    self._snapshot_thread = threading.Thread(
                        target=self._snapshot, args=(step,), name="rlsdk-snapshot", daemon=True
                    )
                    self._snapshot_thread.start()
                case Publish() | Train() as command if self._snapshot_thread is not None:
                    self._after_snapshot.append(command)
                case Publish(step):
                    self._work.publish(step, lambda error, step=step: self.inbox.put(error or Published(step)))  # type: ignore[misc]
                case Start() as start if self.starts_are_paused and self.schedule.starts_newest(start):
                    self._paused_starts.append(start)
                case Start(step, groups, weights):
                    self._work.start(step, groups, weights)
                case Train(step, groups):
                    self._work.train(step, groups)

    def _snapshot(self, step: int) -> None:
        try:
            self._work.snapshot_weights(step)
        except BaseException as error:
            self.inbox.put(error)
        else:
            self.inbox.put(_SnapshotReady(step))
