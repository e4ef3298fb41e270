"""What processes there are below one, and what they take: read from a `/proc` that was opened before it was hidden."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def descendants(proc: int, pid: int, most: int) -> list[int]:
    """Processes below one, at least `most` of them if there are more."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < most:
        more = children(proc, left.pop())
        found += more
        left += more
    return found


def children(proc: int, pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in _names(proc, f"{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, _content(proc, f"{pid}/task/{task}/children").split())
    return found


def resident(proc: int, pid: int) -> int:
    """Bytes of memory of a process."""
    with contextlib.suppress(OSError, IndexError):
        return int(_content(proc, f"{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _names(proc: int, path: str) -> Iterator[str]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        yield from os.listdir(fd)
    finally:
        os.close(fd)


def _content(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY, dir_fd=proc)
    try:
        return os.read(fd, 65_536)
    finally:
        os.close(fd)
