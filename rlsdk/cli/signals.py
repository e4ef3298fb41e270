"""Ctrl-C once ends a run cleanly; twice ends it now."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """First SIGINT or SIGTERM calls `stop`; the second raises KeyboardInterrupt in the main thread."""
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        stop()
        say("stopping: the step is finished and saved first; once more stops at once, without saving")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
