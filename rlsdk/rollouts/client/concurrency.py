"""Number of samples that a replica decodes concurrently: hill climbing on measured throughput. Pure: no clock, no I/O.

More concurrent samples use the device better, until the KV cache is full (an engine then preempts samples and
recomputes them) or decoding is compute-bound. Beyond that point more samples gain nothing: each only takes longer, and
more must be recomputed when new weights arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RATIO = 1.5
"""Ratio between one level and the next."""
TOLERANCE = 0.02
"""Relative loss of throughput that is tolerated. Levels are compared with their neighbours, so the total loss relative
to high concurrency can be about twice that."""
EXPIRY = 16
"""Windows after which the measurement of a level expires."""
FULL = 0.95
"""Share of used KV cache above which an engine is about to preempt samples."""
LEAST_SAMPLES = 8
LEAST_S = 0.25
"""Shortest window, in seconds."""


def levels_up_to(most: int) -> tuple[int, ...]:
    """Levels from 1 to `most` samples in steps of about `RATIO`, lowest first."""

    def descending() -> Iterator[int]:
        level = most
        while level > 1:
            yield level
            level = min(round(level / RATIO), level - 1)
        yield 1

    return tuple(reversed(tuple(descending())))


@dataclass(frozen=True, kw_only=True)
class Window:
    """Measurement of a replica over a time in which its queue was never empty."""

    seconds: float
    tokens: int
    full: bool = False
    """Whether its KV cache was full at least once."""


class ConcurrencyControl:
    """Finds the lowest level whose throughput is as good as that of any recently measured level.

    It starts at the highest level and moves by at most one level. A level with a full KV cache is left immediately;
    this level and higher ones are not tried again for `EXPIRY` windows.
    """

    def __init__(self, most: int) -> None:
        """`most`: largest number of samples that the engine decodes at once."""
        self._levels = levels_up_to(most)
        self._at = len(self._levels) - 1
        self._rates: dict[int, tuple[float, int]] = {}
        """By level: tokens per second, and the window of the last measurement."""
        self._closed: dict[int, int] = {}
        """By level: the last window (inclusive) in which it is not tried."""
        self._count = 0

    @property
    def limit(self) -> int:
        """Samples that the replica may run at once."""
        return self._levels[self._at]

    def observe(self, window: Window) -> None:
        """Records a measurement at the current limit, and sets the next limit."""
        self._count += 1
        if window.full:
            for level in range(self._at, len(self._levels)):
                self._closed[level] = self._count + EXPIRY
            self._at = max(self._at - 1, 0)
            return
        rate = window.tokens / window.seconds
        before = self._fresh().get(self._at)
        self._rates[self._at] = (rate if before is None else (rate + before) / 2, self._count)
        self._at = self._towards(self._choose())

    def _fresh(self) -> dict[int, float]:
        """Throughput of the usable levels whose measurement has not expired."""
        return {
            level: rate
            for level, (rate, seen) in self._rates.items()
            if self._count - seen <= EXPIRY and self._is_open(level)
        }

    def _is_open(self, level: int) -> bool:
        return self._closed.get(level, 0) < self._count

    def _choose(self) -> int:
        """Returns the best level, or a neighbour of it that has no measurement."""
        fresh = self._fresh()
        if not fresh:
            return 0
        enough = (1 - TOLERANCE) * max(fresh.values())
        best = min(level for level, rate in fresh.items() if rate >= enough)
        for level in (best - 1, best + 1):
            if 0 <= level < len(self._levels) and level not in fresh and self._is_open(level):
                return level
        return best

    def _towards(self, level: int) -> int:
        return max(min(level, self._at + 1), self._at - 1)


class ConcurrencyMeter:
    """Splits the reports of one replica into windows, each of about one turnover of its samples, for a control.

    Only periods in which requests wait are informative about the limit. After a change of the limit or of the weights,
    a new window starts once the number of running samples is within the limit.
    """

    def __init__(self, most: int) -> None:
        """`most`: largest number of samples that the engine decodes at once."""
        self._control = ConcurrencyControl(most)
        self._begun: tuple[float, int] | None = None
        """When the window began, and the tokens decoded by then."""
        self._samples = 0
        self._full = False

    @property
    def limit(self) -> int:
        """Samples that the replica may run at once."""
        return self._control.limit

    def restart(self) -> None:
        """Drops the current window, because decoding was interrupted."""
        self._begun = None

    def report(self, now: float, *, tokens: int, samples: int, running: int, waiting: bool, used: float | None) -> None:
        """Records one answer of the replica.

        Args:
            now: seconds of any clock.
            tokens: decoded by the process so far.
            samples: number that finished with this answer.
            running: samples that run after this answer.
            waiting: whether requests wait for a free slot.
            used: share of its KV cache that running samples hold; None: unknown.
        """
        if not waiting:
            self.restart()
            return
        if self._begun is None:
            if running <= self.limit:
                self._begun, self._samples, self._full = (now, tokens), 0, False
            return
        self._samples += samples
        self._full = self._full or (used is not None and used >= FULL)
        seconds, made = now - self._begun[0], tokens - self._begun[1]
        turned_over = self._samples >= max(self.limit, LEAST_SAMPLES) and seconds >= LEAST_S
        if self._full or turned_over:
            self._control.observe(Window(seconds=seconds, tokens=made, full=self._full))
            self.restart()
