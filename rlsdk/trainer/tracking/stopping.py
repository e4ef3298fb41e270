"""How a run is stopped: after its step, or as soon as possible because the machine is preempted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlsdk.interfaces import RlsdkError


class PreemptedError(RlsdkError):
    """The machine is preempted: the awaited result will not be computed by this process."""


class EvaluationStoppedError(RlsdkError):
    """The run was asked to end during an evaluation: there are no metrics, and no partial state."""


class StopFlag:
    """Set by a signal handler; the loop checks it between steps."""

    def __init__(self) -> None:
        self.is_set = False
        self.is_preempted = False
        self.has_begun = False
        """Whether a step may be running, so that there may be something to save."""
        self._interrupt: Callable[[], None] | None = None
        self._deadline_s: float | None = None
        self._timer: threading.Timer | None = None

    def set(self) -> None:
        """Requests a stop after the current step."""
        self.is_set = True

    def preempt(self) -> None:
        """Requests an immediate stop: a step does not finish its waits. Safe in a signal handler."""
        self.is_set = self.is_preempted = True
        if self._deadline_s is not None and self._timer is None:
            self._timer = threading.Timer(self._deadline_s, _end)
            self._timer.daemon = True
            self._timer.start()
        if self._interrupt is not None:
            self._interrupt()

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None], deadline_s: float) -> Iterator[None]:
        """Context manager for the steps: inside, `preempt` calls `interrupt`, and sends a second SIGTERM after
        `deadline_s` seconds."""
        self.has_begun = True
        self._interrupt, self._deadline_s = interrupt, deadline_s
        if self.is_preempted:
            self.preempt()
        try:
            yield
        finally:
            self._interrupt = self._deadline_s = None
            if self._timer is not None:
                self._timer.cancel()

    def __call__(self) -> bool:
        return self.is_set


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
