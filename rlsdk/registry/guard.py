"""Runs a stranger's code (entry modules and hooks of plugins, targets of import strings) so that it costs at most its
own row."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

from rlsdk.system.printable import described
from rlsdk.system.streams import stdout_aside

logger = logging.getLogger(__name__)

SLOW_S = 10.0
"""Seconds after which a plugin that is still being loaded is named."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class PluginExitError(RuntimeError):
    """A stranger's code raised what would have ended this program: SystemExit, KeyboardInterrupt without Ctrl-C,
    GeneratorExit, ..."""


class Guard:
    """Context manager around a call into a stranger's code.

    What the code prints goes to standard error. The current folder, the streams, and the handlers of SIGINT and SIGTERM
    are as before afterwards. An exception that is no `Exception` leaves as `PluginExitError`, unless Ctrl-C was
    pressed: then KeyboardInterrupt leaves, whatever the code made of it. `os._exit` raises SystemExit.
    """

    def __init__(self, slow: str = "") -> None:
        """Prepares the call.

        Args:
            slow: warning that is logged once if the code runs longer than `SLOW_S`; empty: none.
        """
        self._slow = slow
        self._interrupted = False
        self._inside: tuple[int, int] | None = None
        self._handlers: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Guard:
        self._streams = sys.stderr
        self._folder = _current_folder()
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            if callable(self._handlers[signal.SIGINT]):
                signal.signal(signal.SIGINT, self._interrupt)
        self._inside = _here()
        self._exit, os._exit = os._exit, self._refuse_exit
        self._aside = stdout_aside()
        self._aside.__enter__()
        if self._slow:
            self._timer = threading.Timer(SLOW_S, logger.warning, (self._slow,))
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._inside, os._exit = None, self._exit
        sys.stderr = self._streams
        self._aside.__exit__(None, None, None)
        for number, handler in self._handlers.items():
            if handler is not None:  # one that was not set from Python cannot be set again
                signal.signal(number, handler)
        if self._folder is not None and _current_folder() != self._folder:
            with suppress(OSError):
                os.chdir(self._folder)
        if self._interrupted:
            raise KeyboardInterrupt from error
        if error is not None and not isinstance(error, Exception):
            raise PluginExitError(f"it raised {described(error)}") from error

    def _refuse_exit(self, status: int) -> NoReturn:
        """In place of `os._exit`: processes that the code forks and other threads may still use it."""
        if self._inside == _here():
            raise SystemExit(f"os._exit({status})")
        self._exit(status)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._handlers[signal.SIGINT](number, frame)


def _here() -> tuple[int, int]:
    """This process and thread."""
    return os.getpid(), threading.get_ident()


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None
