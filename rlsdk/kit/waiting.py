"""Waits for work of another thread or loop whose processes may die silently meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
LOOK_S = 1.0
"""Between two looks at what the work needs."""


def _never() -> float:
    return math.inf


def result_while(
    future: Future[Result],
    timeout_s: float,
    look: Callable[[], object],
    *,
    idle_s: Callable[[], float] = _never,
    late: Callable[[], BaseException] = TimeoutError,
) -> Result:
    """Returns what a future brings, also where it is done just as the time is over; raises what it raises.

    Args:
        future: cancelled where the wait ends before it.
        timeout_s: for the whole wait; infinite: as long as it takes.
        look: called every second, and before the wait is given up; what it raises ends the wait.
        idle_s: seconds without a sign of progress (`rlsdk.kit.progress.idle_s`): the limit counts from the last sign.
            Not given: none is heeded.
        late: makes the error for a wait that took longer.

    Raises:
        TimeoutError: it took longer, unless `late` makes another error.
    """
    began = time.monotonic()
    while True:
        left_s = timeout_s - min(time.monotonic() - began, idle_s())
        try:
            return future.result(max(min(LOOK_S, left_s), 0.0))
        except TimeoutError:
            if future.done():  # between the two, or the error is its own
                return future.result()
        try:
            look()
            if min(time.monotonic() - began, idle_s()) >= timeout_s:
                raise late()
        except BaseException:
            future.cancel()
            raise
