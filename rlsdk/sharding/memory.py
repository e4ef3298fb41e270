"""Memory that two processes of one node share, without a name that could be left behind.

The owner makes anonymous memory (`memfd_create`) and keeps its descriptor open; the other process opens it as
`/proc/PID/fd/N`. The kernel frees it when both are gone, whatever ended them. Where that is not possible (no memfd, a
/proc that hides the owner), a file in /dev/shm serves; the reader unlinks it as soon as it is attached, and the owner
when it ends, if nobody did.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import WeightSyncError

PAGE_BYTES = 1 << 21
"""Blocks are made in multiples of this, so that buckets of nearly equal size reuse one block."""


class AttachError(WeightSyncError):
    """This process cannot open the owner's memory; another transport may still reach."""


@dataclass(frozen=True)
class BlockName:
    """How another process finds a block."""

    path: str
    inode: int
    """Tells a block from a later one that got the same path."""
    num_bytes: int
    unlink: bool
    """The reader removes `path` once it is attached."""


class SharedBlock:
    """The owner's end. `tensor` is `[num_bytes]` uint8 in shared memory."""

    def __init__(self, num_bytes: int, *, anonymous: bool) -> None:
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if anonymous:
            fd = os.memfd_create("rlsdk-weights", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            fd, path = tempfile.mkstemp(prefix=f"rlsdk-weights-{os.getpid()}-", dir=folder)
        self._release = weakref.finalize(self, _release, fd, None if anonymous else path)
        try:
            # Takes the pages now: a full /dev/shm is an error here, and not a bus error at the first write.
            os.posix_fallocate(fd, 0, size)
            self.tensor: Tensor = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        except OSError as error:
            self._release()
            raise WeightSyncError(f"cannot take {size} bytes of shared memory at {path}: {error}") from error
        self.name = BlockName(path=path, inode=os.fstat(fd).st_ino, num_bytes=size, unlink=not anonymous)

    def close(self) -> None:
        """Gives the memory back once no tensor refers to it any more."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._release()


def _release(fd: int, path: str | None) -> None:
    os.close(fd)
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def attach(name: BlockName) -> Tensor:
    """The other end: the block's bytes, `[num_bytes]` uint8, writable, for as long as the tensor lives.

    Raises:
        AttachError: the block cannot be opened from here, or is another one by now.
    """
    try:
        fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AttachError(f"cannot open the source's shared memory at {name.path}: {error}") from error
    try:
        found = os.fstat(fd)
        if found.st_ino != name.inode or found.st_size < name.num_bytes:
            raise AttachError(f"{name.path} is no longer the block of {name.num_bytes} bytes that the source announced")
        block = mmap.mmap(fd, name.num_bytes)
    finally:
        os.close(fd)
    if name.unlink:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name.path)
    return torch.frombuffer(block, dtype=torch.uint8)
