"""Ends a local Ray cluster with the program that started it, however that program ends: kill -9 included.

A small process of its own. The program writes the numbers of its daemons to it, one a line. When the line closes, or
the program is gone, the daemons are killed with all that they started (workers, and what engines have started in
them), and the cluster's folder is removed. Ray alone leaves its agents behind for a minute when its daemon is killed,
and an engine's own processes for good.

What belongs to the cluster is known by descent, and by a mark in its environment: a process whose worker died before
it descends from nobody.

Run by path with `-P`, so it must import nothing of rlsdk: it is up in a few hundredths of a second.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

MARK = "RLSDK_CLUSTER"
"""Environment variable that every process of a cluster inherits: the cluster's folder."""
_LOOK_S = 1.0
"""How often to look whether the program is still the parent: a forked child of it may hold the pipe open."""
_DEATH_S = 5.0


class Keeper:
    """The program's end of the pipe."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # keys pressed in the terminal are for the program
        )

    def watch(self, pid: int) -> None:
        """Adds a daemon."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pid}\n".encode())
        self._process.stdin.flush()

    def end(self, timeout_s: float) -> None:
        """Kills the daemons with all that they started, removes the folder, and waits for that. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def main(program: int, folder: str) -> None:
    """Waits for the end, then makes it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    daemons: list[psutil.Process] = []
    text = b""
    while os.getppid() == program:
        if not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            continue
        chunk = os.read(sys.stdin.fileno(), 4096)
        if not chunk:
            break
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            with suppress(psutil.Error):
                daemons.append(psutil.Process(int(line)))
    kill_all(daemons, folder)
    shutil.rmtree(folder, ignore_errors=True)


def kill_all(daemons: list[psutil.Process], folder: str) -> None:
    """Kills what belongs to a cluster. Each process is stopped first: a stopped process starts no other."""
    stopped: set[psutil.Process] = set()
    while fresh := (_descendants(daemons) | _marked(folder)) - stopped:
        for process in fresh:
            with suppress(psutil.Error):
                process.suspend()
        stopped |= fresh
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + _DEATH_S
    while time.monotonic() < deadline and not all(map(_is_dead, stopped)):
        time.sleep(0.01)


def _is_dead(process: psutil.Process) -> bool:
    """Gone, or a zombie that only its parent can take away."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _descendants(roots: list[psutil.Process]) -> set[psutil.Process]:
    found = set()
    for root in roots:
        with suppress(psutil.Error):
            found |= {root, *root.children(recursive=True)}
    return found


def _marked(folder: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # other users' processes cannot be read
            if process.environ().get(MARK) == folder and not _is_dead(process):
                found.add(process)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
