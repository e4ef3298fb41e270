"""Ends a local Ray cluster when the program that started it ends, even by kill -9.

The watchdog is a small process, with a fork that takes over if the watchdog itself is killed. The program writes the
process ids of its daemons to a pipe, one per line. When the pipe closes, or the program is gone, the watchdog kills the
daemons and all their descendants (workers, and processes that engines started) and removes the cluster's folder.
Without it Ray leaves its agents running for a minute after its daemon is killed, and processes of engines forever.

Processes of the cluster are recognised as descendants, or by a variable in their environment: a process whose worker
died before it has no ancestor in the cluster.

Run by path with `-P`, so it must not import rlsdk: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

MARK = "RLSDK_CLUSTER"
"""Environment variable that every process of a cluster inherits: the cluster's folder."""
DONE = b"done"
"""Sent in place of a process id: nothing must be killed or removed."""
_LOOK_S = 1.0
"""Seconds between checks that the program is still the parent: a forked child of it may hold the pipe open."""
_DEATH_S = 5.0


class RayWatchdog:
    """The program's end of the pipe to the watchdog process."""

    def __init__(self, folder: str, environment: Mapping[str, str] | None = None) -> None:
        """Starts it with these environment variables; None: those of this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # keys pressed in the terminal are for the program
        )

    def watch(self, pid: int) -> None:
        """Adds a daemon."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{pid}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise OSError("the process that ends Ray with this program has ended itself") from error

    def release(self, timeout_s: float) -> None:
        """Ends the watchdog without a cleanup: the daemons keep running, and the folder stays."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(DONE + b"\n")
            self._process.stdin.flush()
        self.end(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Kills the daemons with all that they started, removes the folder, and waits until done. Safe to call
        twice."""
        if self._process.stdin is not None:
            with suppress(OSError):  # it has ended already
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def main(program: int, folder: str) -> None:
    """Waits for the end of the program, then cleans up. A standby fork takes over if this process is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = _process(program)
    for_spare, to_spare = os.pipe()
    spare = os.fork() == 0
    if spare:
        os.setsid()
        os.close(to_spare)
        daemons, done = listen(for_spare, lambda: False)
        if not done:
            more, done = listen(sys.stdin.fileno(), lambda: parent is None or _is_dead(parent))
            daemons += more
    else:
        os.close(for_spare)
        daemons, done = listen(sys.stdin.fileno(), lambda: os.getppid() != program, copy=to_spare)
    if not done:
        kill_all(daemons, folder)
        shutil.rmtree(folder, ignore_errors=True)
    if not spare:
        _write(to_spare, DONE + b"\n")


def listen(line: int, is_over: Callable[[], bool], copy: int | None = None) -> tuple[list[psutil.Process], bool]:
    """Reads numbers of daemons from a pipe until it closes, or all is over.

    Args:
        line: descriptor of the pipe.
        is_over: polled every second.
        copy: descriptor to which all that is read is written as well.

    Returns:
        The daemons, and whether the other end said that there is nothing to do.
    """
    daemons: list[psutil.Process] = []
    text = b""
    poller = select.poll()
    poller.register(line, select.POLLIN)
    while not is_over():
        if not poller.poll(_LOOK_S * 1000):
            continue
        chunk = os.read(line, 4096)
        if not chunk:
            break
        if copy is not None:
            _write(copy, chunk)
        *words, text = (text + chunk).split(b"\n")
        for word in words:
            if word == DONE:
                return daemons, True
            if (daemon := _process(int(word))) is not None:
                daemons.append(daemon)
    return daemons, False


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _write(descriptor: int, data: bytes) -> None:
    with suppress(OSError):  # who stood by is gone
        os.write(descriptor, data)


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
    """Whether a process is gone, or a zombie that only its parent can reap."""
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
