"""Summary of a run's time, throughput and memory: the last lines in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from rlsdk.system.quantities import counted, duration
from rlsdk.trainer.tracking.step_times import has_own_time, phase_names

RECENT = 20
"""Number of newest steps from which the remaining time is estimated."""
MEMORY_EVERY_S = 30.0
LEAST_SHARE = 0.005
"""Least share of the time of all steps; phases below it are not shown."""


class Totals:
    """Adds up the steps of a run."""

    def __init__(self) -> None:
        self._steps = 0
        self._gradient: bool | None = None
        """Whether a step had one; None: no step said."""
        self._seconds: dict[str, float] = {}
        self._step_s = 0.0
        self._tokens = self._rated_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._memory = 0
        self._looked = -MEMORY_EVERY_S

    def step(self, metrics: Mapping[str, float]) -> None:
        """Adds a step."""
        seconds = metrics.get("time/step_s", 0.0)
        self._steps += 1
        if (norm := metrics.get("policy/grad_norm")) is not None:
            self._gradient = bool(self._gradient) or norm != 0
        self._step_s += seconds
        if has_own_time(metrics):  # otherwise a resume would promise that all steps are as fast as those it repeats
            self._tokens += seconds * metrics.get("throughput/tokens_per_s", 0.0)
            self._rated_s += seconds
            self._recent.append(seconds)
        for name in phase_names(metrics):
            self._seconds[name] = self._seconds.get(name, 0.0) + metrics[name]
        if time.monotonic() - self._looked >= MEMORY_EVERY_S:
            self._looked = time.monotonic()
            self._memory = max(self._memory, memory_of_processes())

    def left(self, steps: int) -> str:
        """Estimated time of the remaining steps, from the newest ones; empty if unknown. Excludes evaluations and
        checkpoints."""
        if not sum(self._recent):
            return ""
        each = sum(self._recent) / len(self._recent)
        return f"{duration(self._step_s)} in steps so far, about {duration(each * steps)} for the {steps} that are left"

    def lines(self) -> Iterator[str]:
        """The summary, in at most 80 columns; empty for a run without steps."""
        if not self._step_s:
            return
        yield ""
        rate = f", {self._tokens / self._rated_s:,.0f} tokens/s" if self._rated_s else ""
        yield f"{counted(self._steps, 'step')}, {self._step_s / self._steps:.2f} s each{rate}"
        shares = {name: seconds / self._step_s for name, seconds in self._seconds.items() if name != "time/eval_s"}
        parts = [
            f"{name.removeprefix('time/').removesuffix('_s').replace('_', ' ')} {share:.0%}"
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= LEAST_SHARE
        ]
        yield from _wrapped("time by phase: ", parts)
        if self._gradient is False:
            yield "warning: no step had a gradient, so nothing was learned"
        if self._memory:
            yield f"main memory: {self._memory / 2**30:.1f} GiB at most, all processes of the run on this machine"


def memory_of_processes() -> int:
    """Bytes of main memory of this process and its descendants; shared memory is divided among its users. 0 if the
    system does not report it."""
    total = 0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _wrapped(head: str, parts: list[str], width: int = 80) -> Iterator[str]:
    line = head
    for at, part in enumerate(parts):
        piece = part if at + 1 == len(parts) else f"{part}, "
        if len(line) + len(piece.rstrip()) > width:
            yield line.rstrip()
            line = " " * len(head)
        line += piece
    if parts:
        yield line.rstrip()
