"""Standard output and standard error: harmless text only, failures with a name, and out of the way of strangers."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rlsdk.system.printable import printable

STDOUT, STDERR = "standard output", "standard error"
"""`filename` of errors of these streams."""
_BAR = re.compile(r"\r|(\x1b\[A)+")
"""What a progress bar of a library starts with: the start of its line, or the line above."""


class NamedStream:
    """A stream whose errors say which stream it is: a full disk or a reader that has gone is no fault of the program.

    After an error nothing more is written: Python itself would try again when it ends.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.failed: OSError | None = None
        """Its first error."""

    def write(self, text: str) -> int:
        return int(self._named(lambda: self._stream.write(text)))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._named(self._stream.flush)

    def _named(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError as error:
            self.failed = self.failed or error
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            if error.filename is None:
                error.filename = self._name
            raise

    def check(self) -> None:
        """Flushes it, and raises its first error, even if a library has swallowed it."""
        self.flush()
        if self.failed is not None:
            raise self.failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


class SafeStream(NamedStream):
    """Shows control characters instead of sending them: whatever a command prints may quote others.

    rich writes its own colours past this; `rlsdk.views.terminal.SafeConsole` makes its texts harmless before.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        super().__init__(stream, name)
        self.rich_proxied_file = NamedStream(stream, name)

    def write(self, text: str) -> int:
        # A progress bar goes back to the start of its line; in the middle of a text that would hide what it says.
        bar = _BAR.match(text) if self._name == STDERR else None
        start = bar[0] if bar else ""
        return super().write(start + printable(text[len(start) :]))


@contextmanager
def safe_streams() -> Iterator[None]:
    """Makes standard output and error of this process safe, and flushes them at the end.

    Raises:
        OSError: what was printed could not be written; `filename` is `STDOUT` or `STDERR`.
    """
    kept = sys.stdout, sys.stderr
    for stream in kept:
        if stream is not None and hasattr(stream, "reconfigure"):
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # a terminal may not know a character
    sys.stdout, sys.stderr = (
        stream if stream is None else SafeStream(stream, name)
        for stream, name in zip(kept, (STDOUT, STDERR), strict=True)
    )
    safe = sys.stdout
    try:
        yield
        if isinstance(safe, SafeStream):
            safe.check()
            safe.rich_proxied_file.check()
    finally:
        sys.stdout, sys.stderr = kept


class _Aside:
    """Sends standard output to standard error, on the level of Python and of descriptors, while it is entered at least
    once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._stdout: Any = None
        self._descriptor: int | None = None

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            _flush(sys.stdout)
            self._stdout, self._descriptor = sys.stdout, None
            with suppress(OSError):
                self._descriptor = os.dup(1)
                os.dup2(2, 1)
            sys.stdout = sys.stderr

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            _flush(sys.stdout)
            sys.stdout = self._stdout
            if self._descriptor is not None:
                with suppress(OSError):
                    os.dup2(self._descriptor, 1)
                os.close(self._descriptor)


_aside = _Aside()


@contextmanager
def stdout_aside() -> Iterator[None]:
    """What the block prints, also by subprocesses and by libraries in C, goes to standard error: a program reads the
    command's standard output. May be nested."""
    _aside.enter()
    try:
        yield
    finally:
        _aside.leave()


def _flush(stream: Any) -> None:
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()
