"""Temporary folders and files that are removed although their process was killed: by the next one that makes one.

A process keeps what it makes locked (`flock`) for as long as it lives; the system releases the lock however it ends. So
an unlocked one has no owner, also where process ids say nothing: after ids were reused, or in another container.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = "rlsdk-held-"
"""Beginning of the names of folders. Only folders with it, made on this machine, are ever removed."""
_NOBODY = 65_534
"""The user to whom root gives folders of graders (`rlsdk.confinement`)."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HeldFolder:
    """A new temporary folder, removed by `close`, or by another process once this one has ended."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """Makes it, and removes those of processes that were killed.

        Args:
            kind: part of its name: what it is for.
            parent: where; None: the system's folder for temporary files.
        """
        place = parent or tempfile.gettempdir()
        remove_abandoned(place)
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{_own_prefix()}{kind}-", dir=place)
            # Another process may take it for abandoned right after it was made, before or after it is opened here.
            with suppress(FileNotFoundError):
                self._lock = os.open(self.path, _FLAGS | os.O_DIRECTORY)
                if hold(self._lock):
                    return
                os.close(self._lock)

    def close(self) -> None:
        """Removes the folder. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def held_folder(kind: str, parent: str | None = None) -> Iterator[str]:
    """Yields the path of a `HeldFolder`, and removes it."""
    folder = HeldFolder(kind, parent)
    try:
        yield folder.path
    finally:
        folder.close()


def hold(descriptor: int) -> bool:
    """Locks a new file or folder until the descriptor is closed. False if another process has just removed it.

    Where the file system has no locks it stays unlocked, and nobody can lock it to remove it.
    """
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def remove_abandoned(parent: str) -> None:
    """Removes folders of this user whose process has ended. Follows no links, and waits for nothing."""
    owners = {os.getuid()} | ({_NOBODY} if os.getuid() == 0 else set())
    for name in _names(parent, _own_prefix()):
        with suppress(OSError), _opened(os.path.join(parent, name), os.O_DIRECTORY) as descriptor:
            if os.fstat(descriptor).st_uid in owners:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


@cache
def _own_prefix() -> str:
    """The names of this machine's folders. Where others share the folder, their locks may not be seen here."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""
    return f"{PREFIX}{hashlib.sha256(f'{socket.gethostname()} {machine}'.encode()).hexdigest()[:8]}-"


def _names(parent: str, prefix: str) -> list[str]:
    try:
        return [name for name in os.listdir(parent) if name.startswith(prefix)]
    except OSError:
        return []


@contextmanager
def _opened(path: str, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, _FLAGS | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
