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
"""Linux flag (include/linux/sched.h), set before an exiting process closes its files."""
_FREEING_S = 2.0
"""Seconds for an exiting daemon's memory to be freed; only then is its exit status known."""
_watched: dict[str, subprocess.Popen[bytes]] = {}


def watch_daemons(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Sets the cluster daemons to watch, by name; empty: none."""
    _watched.clear()
    _watched.update(processes)


def dead_daemon() -> str | None:
    """Describes a daemon that has ended or is exiting; None while all run."""
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
    """Whether a process is exiting: its connections are closed or about to be, but it cannot be reaped until its memory
    is freed, which takes tens of milliseconds for an object store. False if the system does not say."""
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
    """Raises if a daemon has ended. Also called before each access to the object store: if the store is gone, Ray ends
    this process at once, without an error that could be caught.

    Raises:
        WorkerError: a daemon of the local cluster has ended.
    """
    if dead := dead_daemon():
        raise WorkerError(
            f"a daemon of this run's Ray cluster has ended ({dead}), so the run cannot go on. Something killed it "
            "(look for the out-of-memory killer in `dmesg`), or it crashed. Checkpoints are not touched: the same "
            "command resumes from the newest"
        )
