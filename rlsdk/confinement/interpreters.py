"""An interpreter of cells: a confined process, and those that end it with the sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from rlsdk.confinement import cells
from rlsdk.confinement.room import NEWPID, Room

_PR_SET_PDEATHSIG = 1
_KILLED = 128
"""Exit code of a killed process: this and the number of the signal, as shells have it."""


class Interpreter:
    """Processes that run the cells of one kind, one cell after another."""

    def __init__(self, room: Room, kind: str) -> None:
        self.kind = kind
        self.asked = 0
        """Cells so far: the number of the answer that is waited for."""
        (asked, self.requests), (self.results, told) = os.pipe(), os.pipe()
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        theirs, keeper = (asked, told, out, err), os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _watch_over(room, keeper, lambda: cells.run(room, kind, *theirs))
        for fd in theirs:
            os.close(fd)
        for fd in (self.requests, self.results, self.stdout, self.stderr):
            os.set_blocking(fd, False)

    def end(self, grace_s: float = 0.0) -> int:
        """Kills its processes; returns the exit code of the interpreter.

        Args:
            grace_s: for which to wait for that code, where it has ended by itself.
        """
        until, done, status = time.monotonic() + grace_s, 0, 0
        while not done and time.monotonic() < until:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not done:
            _, status = os.waitpid(self.pid, 0)
        for fd in (self.requests, self.results, self.stdout, self.stderr):
            os.close(fd)
        return _code(status)


def _watch_over(room: Room, keeper: int, run: Callable[[], None]) -> NoReturn:
    """Runs `run` in a process that ends with this one, as this one ends with the keeper.

    In a new PID namespace its first process watches over the others: all of them end with it.
    """
    try:
        os.setsid()
        _end_with(keeper)
        if room.is_unshared and ctypes.CDLL(None).unshare(NEWPID):
            os._exit(1)
        watcher = os.getpid()
        first = os.fork()
        if not first:
            _end_with(None if room.is_unshared else watcher)
            if room.is_unshared and (second := os.fork()):
                _await_and_exit(second)
            os.setsid()
            run()
        _await_and_exit(first)
    finally:
        os._exit(1)


def _end_with(parent: int | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _await_and_exit(child: int) -> NoReturn:
    """Exits as a child does; meanwhile buries others. Holds no file open: its end is seen by those who read."""
    os.closerange(0, 4096)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(_code(status))


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _KILLED - code
