"""Timeline of a run's two pools: one line per step in a file, which `rlsdk report` draws."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlsdk.trainer.tracking.trackers import read_lines

FILE = "timeline.jsonl"
"""File name in a run's folder."""
MERGED = 200
"""Time resolution: groups of one step that finish within 1/200 of the step's time become one event."""

LATEST = 1e11
"""Latest time that can be drawn, in seconds since the epoch."""
Kind = Literal["begin", "start", "made", "publish", "served", "hold", "held", "train", "trained"]
"""`begin`: a process went on with the run; what an earlier one had under way is gone."""


@dataclass(frozen=True)
class Moment:
    """One event."""

    at: float
    """Seconds since the epoch."""
    kind: Kind
    step: int
    """Step for which groups are made, whose weights are published, or which trains."""
    count: int = 1
    """Groups."""


class PoolTimes:
    """Records events, and writes them at the end of each step. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file; None: nothing is written."""
        self._path = path
        self._lock = threading.Lock()
        self._moments: list[Moment] = []
        self._last = time.time()
        self._step_s = 0.0

    def begin(self, step: int, *, resumed: bool) -> None:
        """Called before the first event of this process, with the number of steps done. A run that is not resumed
        removes an earlier run's file."""
        if self._path is not None and not resumed:
            with contextlib.suppress(OSError):  # as in `write`
                self._path.unlink(missing_ok=True)
        if resumed:
            self.note("begin", step)

    def note(self, kind: Kind, step: int, count: int = 1) -> None:
        """Records an event that happens now."""
        if self._path is None:
            return
        with self._lock:
            now = time.time()
            at = len(self._moments) - 1
            if kind == "made" and at >= 0:
                last = self._moments[at]
                if (last.kind, last.step) == (kind, step) and now - last.at < self._step_s / MERGED:
                    self._moments[at] = Moment(last.at, kind, step, last.count + count)
                    return
            self._moments.append(Moment(now, kind, step, count))

    def write(self, step: int) -> None:
        """Writes the events of a finished step. A failed write is ignored: it leaves a gap in the timeline but does not
        end the run."""
        if self._path is None:
            return
        with self._lock:
            moments, self._moments = self._moments, []
            now = time.time()
            self._step_s, self._last = now - self._last, now
        rows = [[round(moment.at, 4), moment.kind, moment.step, moment.count] for moment in moments]
        line = json.dumps({"step": step, "moments": rows}, separators=(",", ":")) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)


def read_times(path: Path, *, last_steps: int) -> list[Moment]:
    """Reads the events of the last steps, ordered by time, without those before the last resume: the time between two
    processes belongs to no step. Invalid lines are skipped."""
    lines: dict[int, Sequence[Moment]] = {}
    for line in read_lines(path):
        step, moments = line.get("step"), _moments(line)
        if isinstance(step, int) and moments:
            begins = any(moment.kind == "begin" for moment in moments)
            lines = {} if begins else {before: kept for before, kept in lines.items() if before < step}
            lines[step] = moments
    shown = list(lines.values())[-last_steps:]
    kept = (moment for moments in shown for moment in moments if moment.kind != "begin")
    return sorted(kept, key=lambda moment: moment.at)


def _moments(found: Mapping[str, Any]) -> list[Moment]:
    try:
        moments = [Moment(float(at), kind, int(step), int(count)) for at, kind, step, count in found["moments"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        return []
    return [moment for moment in moments if 0 <= moment.at < LATEST and 0 <= moment.count < LATEST]
