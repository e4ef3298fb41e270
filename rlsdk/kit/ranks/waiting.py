"""Waits for work of another thread or loop whose processes may die silently."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
LOOK_S = 1.0
"""Seconds between checks of what the work needs."""


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
    """Returns or raises the result of a future, even if it is done just when the time is over.

    Args:
        future: cancelled if the wait ends first.
        timeout_s: limit of the whole wait; infinite: no limit.
        look: called every second, and before the wait times out; its exception ends the wait.
        idle_s: seconds since the last progress (`rlsdk.kit.ranks.progress.idle_s`), from which the limit counts. Not
            given: progress is ignored.
        late: creates the error of a timeout.

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
