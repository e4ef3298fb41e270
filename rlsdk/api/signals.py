"""Ctrl-C once ends a run cleanly; twice ends it now. A terminal that closes, and `kill`, end it cleanly, too."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130
"""By the shell's convention, 128 and the number of SIGINT."""
EXIT_TEMPORARY = 75
"""EX_TEMPFAIL of sysexits.h: ended by the machine before it was done; the same command goes on."""
_STREAMS = (0, 1, 2)
_IMPORT_SYSTEM = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_AGAIN_S = 0.02


class Stopped:
    """What a run was asked to stop by."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the first signal; None while there was none."""

    @property
    def exit_code(self) -> int:
        """For a program that ended before its work was done; 0 where nobody asked for that."""
        if self.number is None:
            return 0
        return EXIT_INTERRUPTED if self.number == signal.SIGINT else EXIT_TEMPORARY


@contextmanager
def stop_on_signal(
    stop: Callable[[], None],
    say: Callable[[str], None],
    second: Callable[[int], None] | None = None,
    *,
    preempt: Callable[[], None] | None = None,
    has_begun: Callable[[], bool] = lambda: True,
) -> Iterator[Stopped]:
    """First SIGINT, SIGTERM or SIGHUP calls `stop`; the second ends the program, with cleaning up but without saving.
    `second` says how, given the number of the signal. A first SIGTERM calls `preempt` instead, where it is given. Where
    no step `has_begun` there is nothing to save, and the first one ends the program.

    A SIGHUP that is ignored (`nohup`) stays so.
    """
    stopped = Stopped()
    terminals = [descriptor for descriptor in _STREAMS if _is_terminal(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            _send_again(number)
            return
        if number == signal.SIGHUP:
            _let_go(terminals)
        if stopped.number is not None:
            (second or _leave)(number)
        stopped.number = number
        if not has_begun():
            say("stopping: nothing was trained yet")
            (second or _leave)(number)
        if number == signal.SIGTERM and preempt is not None:
            preempt()
            say("stopping for SIGTERM: what runs is stopped, kept and saved; once more stops at once, without saving")
            return
        stop()
        say("stopping: the step is finished and saved first; once more stops at once, without saving")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_interrupt(
    stop: Callable[[], None],
    say: Callable[[str], None],
    preempt: Callable[[], None] | None = None,
    has_begun: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """For a program that continues after the run: the first Ctrl-C, or a notebook's interrupt, calls `stop`; the second
    raises `KeyboardInterrupt`. SIGTERM and SIGHUP mean the program: they call `preempt` and `stop`, and end it after
    the run. Before a step `has_begun`, the first one does what the second does.

    Does nothing outside of the main thread, where Python takes no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with stop_on_signal(stop, say, second=_interrupted, preempt=preempt, has_begun=has_begun) as stopped:
        yield
    if stopped.number not in (None, signal.SIGINT):
        sys.exit(stopped.exit_code)


def _interrupted(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    _leave(number)


def _leave(number: int) -> None:
    sys.exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TEMPORARY)


def _is_importing(frame: FrameType | None) -> bool:
    """The signal struck within Python's import system, which may hold the lock of all imports.

    What is raised there can be lost (callbacks of weak references swallow it), and the lock with it: every thread that
    imports would then wait for good.
    """
    return frame is not None and frame.f_code.co_filename in _IMPORT_SYSTEM


def _send_again(number: int) -> None:
    """In a moment, when the interrupted import has gone on."""
    timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _let_go(terminals: list[int]) -> None:
    """Sends what was meant for a terminal that is gone nowhere: a write to it would fail, and end the run."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
