"""When a step ended and what all processes had used by then: the clock that the compared programs share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

import psutil

FILE = "RLSDK_BENCHMARK_MARKS"
"""Environment variable: where marks are written."""
STEPS = "RLSDK_BENCHMARK_STEPS"
"""Environment variable: after which steps the processor time is read, which takes some milliseconds; "5,35"."""


def mark(step: int, metrics: Mapping[str, float] | None = None) -> None:
    """Writes a line after step `step` (from 1), with whatever parts of it are known. A callback of `rlsdk train`."""
    line = {"step": step, "time": time.time(), "parts": dict(metrics or {})}
    if str(step) in os.environ[STEPS].split(","):
        line["cpu_s"] = cpu_seconds(psutil.Process())
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def cpu_seconds(root: psutil.Process) -> float:
    """Processor seconds of a process and all its descendants, those that have ended and were waited for included."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_bytes(root: psutil.Process) -> int:
    """Proportional set size of a process and all its descendants: shared pages count once."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, FileNotFoundError):
            continue
    return total
