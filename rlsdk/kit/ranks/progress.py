"""Progress reports of a process: deadlines count from the last report.

A pass over a large batch, or writing a model to disk, may take any time, but must make progress. Long work calls
`advance` for every piece of it (a micro-batch, a tensor), and waiting code waits as long as reports keep coming.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class _Clock:
    last = time.monotonic()


def advance() -> None:
    """Reports that a piece of work is done or begins. Takes 0.1 microseconds; callable from any thread."""
    _Clock.last = time.monotonic()


def idle_s() -> float:
    """Seconds since the last report."""
    return time.monotonic() - _Clock.last


class Advancing:
    """Wraps a function so that every call reports progress. Attributes are those of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        advance()
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # during copying or unpickling
            raise AttributeError(name)
        return getattr(self._function, name)
