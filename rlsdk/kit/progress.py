"""Progress reports of a process: a deadline counts from the last one.

A pass over a large batch, or a model on its way to a disk, may take any time; what must not happen is that nothing
happens. So work that takes long calls `advance` at every piece of it (a micro-batch, a tensor), and code that waits for
it waits as long as pieces keep coming.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class _Clock:
    last = time.monotonic()


def advance() -> None:
    """A piece of work is done, or begins. Costs a tenth of a microsecond; call it from any thread."""
    _Clock.last = time.monotonic()


def idle_s() -> float:
    """Seconds since the last sign."""
    return time.monotonic() - _Clock.last


class Advancing:
    """A function whose every call is a sign of progress. Attributes are those of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        advance()
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._function, name)
