"""Signal handling: the first Ctrl-C ends a run cleanly, the second at once. A closed terminal and `kill` end it cleanly
too."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130
"""Exit code after an interrupt by the shell's convention: 128 plus the number of SIGINT."""
EXIT_TEMPORARY = 75
"""EX_TEMPFAIL of sysexits.h: the run was preempted; the same command resumes it."""
_STREAMS = (0, 1, 2)
_IMPORT_SYSTEM = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_AGAIN_S = 0.02


class Stopped:
    """The signal by which a run was asked to stop."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the first signal; None: no signal yet."""

    @property
    def exit_code(self) -> int:
        """Exit code of a program that was stopped; 0 if it was not."""
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
    """The first SIGINT, SIGTERM or SIGHUP calls `stop`; the second ends the program, with cleanup but without saving,
    through `second`, which gets the number of the signal. The first SIGTERM calls `preempt` instead, if given. If no
    step `has_begun` there is nothing to save, and the first signal ends the program.

    An ignored SIGHUP (`nohup`) stays ignored.
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
    """For a program that continues after the run: the first Ctrl-C, or interrupt of a notebook, calls `stop`; the
    second raises `KeyboardInterrupt`. SIGTERM and SIGHUP are for the program: they call `preempt` and `stop`, and end
    it after the run. If no step `has_begun`, the first signal acts like the second.

    Does nothing outside the main thread, where Python cannot handle signals.
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
    """Whether the signal arrived within Python's import system, which may hold the global import lock.

    An exception raised there can be lost (weak-reference callbacks swallow it) without releasing the lock: every thread
    that imports would then hang.
    """
    return frame is not None and frame.f_code.co_filename in _IMPORT_SYSTEM


def _send_again(number: int) -> None:
    """Sends the signal again a little later, when the interrupted import has continued."""
    timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _let_go(terminals: list[int]) -> None:
    """Redirects output for a terminal that is gone to nowhere: writing to it would raise, and end the run."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
