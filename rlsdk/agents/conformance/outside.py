"""What a process reaches for outside of itself, as Python's audit hooks report it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind")
_watching: list[list[str]] = []
_installed = threading.Event()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Collects what is reached for while it is open: the network, and files written outside of `folder` and of
    temporary folders. It reports, and stops nothing."""
    if not _installed.is_set():
        _installed.set()
        sys.addaudithook(_heard)
    found: list[str] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)
        allowed = tuple(str(one.resolve()) for one in (folder, Path("/tmp"), Path("/dev")))
        found[:] = [one for one in found if not (one.startswith("writes ") and one[7:].startswith(allowed))]


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    said = None
    if event in _NETWORK:
        is_local = event in ("socket.connect", "socket.bind") and isinstance(arguments[1], str)
        said = None if is_local else f"uses the network ({event})"
    elif _written(event, arguments):
        said = f"writes {os.path.abspath(arguments[0])}"
    if said is not None:
        for found in _watching:
            found.append(said)


def _written(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether it is about a file that is written, made or removed."""
    if event not in ("open", "os.remove", "os.rename", "os.mkdir") or not isinstance(arguments[0], str):
        return False
    if event != "open":
        return True
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
