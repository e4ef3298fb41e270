"""Named resources that outlive a killed process: sockets and shared memory of SGLang's schedulers.

The resources of one engine belong to one folder, which its process keeps locked. Closing the engine removes them; the
next engine on this machine removes those of a killed process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

PREFIX = "rlsdk-sglang-"
LOCK = "lock"
SCHEDULERS = "schedulers"
"""File with the process ids, one per line."""
SHARED = Path("/dev/shm")


class NamedResources:
    """Named resources of one engine."""

    def __init__(self) -> None:
        clear_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        unnamed = self.folder / "new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # From here on other engines may find the folder, and see that it is locked.
        unnamed.rename(self.folder / LOCK)

    def take(self, ports: Any) -> None:
        """Moves SGLang's sockets into the folder, before they are opened.

        Args:
            ports: SGLang's `PortArgs`.
        """
        for at, field in enumerate(fields(ports)):
            address = getattr(ports, field.name)
            if isinstance(address, str) and address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
                setattr(ports, field.name, f"ipc://{self.folder / str(at)}")

    def note(self, schedulers: Sequence[int]) -> None:
        """Records process ids, which are part of the names of their shared memory."""
        (self.folder / SCHEDULERS).write_text("".join(f"{pid}\n" for pid in schedulers), encoding="ascii")

    def clear(self) -> None:
        """Removes the resources; call it once the schedulers have ended."""
        _clear(self.folder)
        self._lock.close()


def clear_leftovers() -> None:
    """Removes resources of engines whose process was killed, of this user on this machine."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        if lock.is_symlink() or lock.parent.is_symlink():  # a stranger's: it would lead out of the folder
            continue
        with suppress(OSError), lock.open("r+") as handle:
            if os.fstat(handle.fileno()).st_uid != os.getuid():
                continue
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(lock.parent)


def _clear(folder: Path) -> None:
    with suppress(OSError):
        pids = (folder / SCHEDULERS).read_text(encoding="ascii").split()
        for pid in [pid for pid in pids if not psutil.pid_exists(int(pid))]:
            for file in SHARED.glob(f"sgl_shm_*_{pid}_*"):
                with suppress(OSError):
                    file.unlink()
    shutil.rmtree(folder, ignore_errors=True)
