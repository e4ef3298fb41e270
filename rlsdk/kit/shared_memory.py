"""Memory that two processes of one node share, without a name that could be left behind.

The owner makes anonymous memory (`memfd_create`) and keeps its descriptor open; the other process opens it as
`/proc/PID/fd/N`. The kernel frees it when both are gone, whatever ended them. Where that is not possible (no memfd, a
/proc that hides the owner), a file in /dev/shm serves; the reader unlinks it as soon as it is attached, and the owner
when it ends, if nobody did.

An engine on a CPU that keeps its weights in such memory (`share`) spares every sync a copy: other processes read them
where they are (`lent`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
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

    def __init__(self, num_bytes: int, *, anonymous: bool, label: str = "rlsdk-bucket") -> None:
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if anonymous:
            fd = os.memfd_create(label, os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            fd, path = tempfile.mkstemp(prefix=f"rlsdk-weights-{os.getpid()}-", dir=folder)
        where = None if anonymous else path
        try:
            # Takes the pages now: a full /dev/shm is an error here, and not a bus error at the first write.
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
        except OSError as error:
            _release(fd, where)
            raise WeightSyncError(f"cannot take {size} bytes of shared memory at {path}: {error}") from error
        self._release = weakref.finalize(memory, _release, fd, where)
        self.memory = weakref.ref(memory)
        """Lives as long as a tensor refers to it; so does the descriptor, unless `close` ends it before."""
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.name = BlockName(path=path, inode=os.fstat(fd).st_ino, num_bytes=size, unlink=not anonymous)

    def close(self) -> None:
        """Nobody can attach any more; gives the memory back once no tensor refers to it."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._release()


def _release(fd: int, path: str | None) -> None:
    os.close(fd)
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


SHARED_WEIGHTS = "rlsdk-weights"
"""What /proc/PID/maps calls the blocks of `share`."""
ALIGNMENT = 64
"""Bytes: shared tensors start at multiples of a cache line."""
_shared: dict[int, tuple[int, BlockName]] = {}
"""First address -> first address after, and name, of each block that `share` made and that is in use."""


def share(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of CPU tensors, contiguous, in one block that other processes of this node can map. It goes with the last
    of them. Where the system has no anonymous shared memory, the tensors themselves."""
    if not tensors or not hasattr(os, "memfd_create"):
        return list(tensors)
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    block = SharedBlock(max(end, 1), anonymous=True, label=SHARED_WEIGHTS)
    first = block.tensor.data_ptr()
    _shared[first] = first + block.name.num_bytes, block.name
    memory = block.memory()
    weakref.finalize(memory, _shared.pop, first)
    found = []
    for tensor, start in zip(tensors, starts, strict=True):
        # Each has its own storage: what is saved or sent of one must not carry the others along.
        values = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel():
            values = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        found.append(values.view(tensor.shape).copy_(tensor.detach()))
    return found


def lent(tensor: Tensor) -> tuple[BlockName, int] | None:
    """The block that a tensor lies in, and the byte in it at which it begins; None where its memory is private."""
    if tensor.device.type != "cpu":
        return None
    at = tensor.data_ptr()
    return next(((name, at - first) for first, (end, name) in tuple(_shared.items()) if first <= at < end), None)


def attach(name: BlockName, *, private: bool = False) -> Tensor:
    """The other end: the block's bytes, `[num_bytes]` uint8, for as long as the tensor lives.

    Args:
        name: from the owner.
        private: what is written here stays in this process; else the owner sees it.

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
        block = mmap.mmap(fd, name.num_bytes, access=mmap.ACCESS_COPY if private else mmap.ACCESS_DEFAULT)
    finally:
        os.close(fd)
    if name.unlink:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name.path)
    return torch.frombuffer(block, dtype=torch.uint8)
