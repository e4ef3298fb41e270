"""Whether the daemons of the local cluster still run: checked in every wait.

Workers answer one another without Ray's daemons, so a run would continue after one is killed, until Ray itself ends the
program a minute later, without an error that could be caught.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from rlsdk.interfaces import WorkerError

_PF_EXITING = 0x4
"""Of Linux, in include/linux/sched.h: set before a process closes what it has open."""
_FREEING_S = 2.0
"""For the memory of a daemon that ends to be freed; then how it ended is known."""
_watched: dict[str, subprocess.Popen[bytes]] = {}


def watch_daemons(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Names the daemons of the cluster that this process uses; empty: none."""
    _watched.clear()
    _watched.update(processes)


def dead_daemon() -> str | None:
    """A daemon that has ended or is about to, and how; None while all run."""
    for name, process in list(_watched.items()):
        if process.poll() is not None or _is_exiting(process.pid):
            return f"{name}, pid {process.pid}, {_how(process)}"
    return None


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_FREEING_S)
    except subprocess.TimeoutExpired:
        return "which is ending"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _is_exiting(pid: int) -> bool:
    """Its connections are closed or will be at once: the memory of an object store takes tens of milliseconds to be
    freed, for which the process can still not be waited for. False where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    # proc(5): the name in brackets is field 2 and may hold anything; flags are field 9.
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def controller_seconds() -> float:
    """Processor time of this process and of the daemons of its Ray cluster, where it has one, in seconds."""
    total = time.process_time()
    for process in list(_watched.values()):
        with suppress(psutil.Error):
            used = psutil.Process(process.pid).cpu_times()
            total += used.user + used.system
    return total


def check_daemons() -> None:
    """Asked before anything that reaches the object store, too: where that is gone, Ray ends this process on the spot,
    without an error that could be caught.

    Raises:
        WorkerError: a daemon of the local cluster has ended.
    """
    if dead := dead_daemon():
        raise WorkerError(
            f"a daemon of this run's Ray cluster has ended ({dead}), so the run cannot go on. Something killed it "
            "(look for the out-of-memory killer in `dmesg`), or it crashed. Checkpoints are not touched: the same "
            "command resumes from the newest"
        )
