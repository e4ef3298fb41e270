"""What this process and its children hold: memory, processes, ports, files, shared memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import psutil

KEEPER = "resource_tracker"
"""Python's own process that frees shared resources; one for the life of the interpreter."""
SHARED = Path("/dev/shm")


def resident_bytes() -> int:
    """Memory of this process and all its children."""
    gc.collect()
    processes = [psutil.Process(), *children()]
    return sum(process.memory_info().rss for process in processes if process.is_running())


def children() -> Sequence[psutil.Process]:
    """Processes that were started by this one or by its children, zombies left out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and KEEPER not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def held(scratch: Path) -> frozenset[str]:
    """Everything that an engine could leave behind, each thing with a name of its own."""
    here = {f"process {process.pid}" for process in children()}
    for process in (psutil.Process(), *children()):
        try:
            connections = process.net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        here |= {f"port {c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN}
    here |= {f"file {path}" for path in scratch.rglob("*")}
    return frozenset(here | {f"shared memory {path.name}" for path in _shared_files()})


def _shared_files() -> list[Path]:
    """Those of this user: others come and go on a machine that is shared."""
    mine = psutil.Process().uids().real if hasattr(psutil.Process(), "uids") else None
    found = []
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        try:
            if mine is None or path.stat().st_uid == mine:
                found.append(path)
        except OSError:
            continue
    return found
