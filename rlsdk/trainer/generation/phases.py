"""Serving the policy: syncs the current weights to the replicas, and measures the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from rlsdk.interfaces import SyncReport
from rlsdk.rollouts import RolloutStream
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.tracking.events import RunView

Enter = Callable[[], AbstractContextManager[SyncReport | None]]
"""Swaps to the inference layout: on entry every replica serves the current weights."""


class RolloutPhase:
    """The phase in which replicas serve: entered by the schedule's `Publish` or for an evaluation, left before
    training."""

    def __init__(self, enter: Enter, stream: RolloutStream, view: RunView) -> None:
        self._enter = enter
        self._stream = stream
        self._view = view
        self._stack = ExitStack()
        self.last_report: SyncReport | None = None
        self._clock = StepClock()
        self._sampled_from = time.perf_counter()
        """When this step began to wait for samples: at its start, or once its weights are served."""

    @contextmanager
    def clocked(self, clock: StepClock) -> Iterator[None]:
        """Measures the seconds of a step: swapping in and out is `sync`, time until the last sample is finished is
        `rollout`, time from then until it is graded is `reward`. A step whose samples all come from the journal only
        has `rollout`."""
        self._clock = clock
        self._sampled_from = time.perf_counter()
        try:
            with clock.measure("rollout"):
                yield
                waited, passed = self._stream.seconds_since_last_sample(), time.perf_counter() - self._sampled_from
                clock.move("rollout", "reward", waited if waited < passed else 0.0)
        finally:
            with clock.measure("sync"):
                self.leave()

    def publish(self) -> None:
        """Syncs the current weights to every replica."""
        start = time.perf_counter()
        self.leave()
        self.last_report = self._stack.enter_context(self._enter())
        self._sampled_from = time.perf_counter()
        self._clock.move("rollout", "sync", self._sampled_from - start)
        if self.last_report is not None:
            self._view.synced(self.last_report)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Context manager: inside, the replicas serve the current weights."""
        self._clock = StepClock()
        self.publish()
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Gives the devices back to training."""
        self._stack.close()
