"""Memory that processes of one node share, without a name that could be left behind.

The owner creates anonymous memory (`memfd_create`) and keeps its descriptor open; the other process opens it as
`/proc/PID/fd/N`. The kernel frees it when both are gone, however they ended.

An engine on a CPU that keeps its weights in such memory (`share`) saves a copy in every sync: other processes read them
in place (`find_block`).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import WeightSyncError

PAGE_BYTES = 1 << 21
"""Sizes of blocks are multiples of this, so that buckets of nearly equal size reuse one block."""


class AttachError(WeightSyncError):
    """This process cannot open the owner's memory; another transport may work."""


@dataclass(frozen=True)
class BlockName:
    """Address of a block for another process."""

    path: str
    inode: int
    """Distinguishes a block from a later one with the same path."""
    num_bytes: int


class SharedBlock:
    """The owner's end. `tensor` is `[num_bytes]` uint8 in shared memory."""

    def __init__(self, num_bytes: int, *, label: str = "rlsdk-bucket") -> None:
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            # Allocates the pages now: memory that is lacking is an error here, instead of a bus error at a write.
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
        except OSError as error:
            os.close(fd)
            raise WeightSyncError(f"cannot take {size} bytes of shared memory at {path}: {error}") from error
        self._release = weakref.finalize(memory, os.close, fd)
        self.memory = weakref.ref(memory)
        """Lives as long as a tensor refers to it, as does the descriptor, unless `close` closes it earlier."""
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.name = BlockName(path=path, inode=os.fstat(fd).st_ino, num_bytes=size)

    def close(self) -> None:
        """Prevents further attaching; frees the memory once no tensor refers to it."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._release()


SHARED_WEIGHTS = "rlsdk-weights"
"""Name of the blocks of `share` in /proc/PID/maps."""
ALIGNMENT = 64
"""Bytes: shared tensors start at multiples of a cache line."""
_shared: dict[int, tuple[int, BlockName]] = {}
"""First address -> end address and name of each block of `share` that is in use."""


def share(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies CPU tensors, contiguous, into one block that other processes of this node can map. It is freed with the
    last of them. If the system has no anonymous shared memory, returns the tensors themselves."""
    if not tensors or not hasattr(os, "memfd_create"):
        return list(tensors)
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    block = SharedBlock(max(end, 1), label=SHARED_WEIGHTS)
    first = block.tensor.data_ptr()
    _shared[first] = first + block.name.num_bytes, block.name
    memory = block.memory()
    weakref.finalize(memory, _shared.pop, first)
    shared = []
    for tensor, start in zip(tensors, starts, strict=True):
        # Each has its own storage: saving or sending one must not include the others.
        values = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel():
            values = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        shared.append(values.view(tensor.shape).copy_(tensor.detach()))
    return shared


def find_block(tensor: Tensor) -> tuple[BlockName, int] | None:
    """The block that contains a tensor, and its byte offset in it; None if its memory is private."""
    if tensor.device.type != "cpu":
        return None
    at = tensor.data_ptr()
    return next(((name, at - first) for first, (end, name) in tuple(_shared.items()) if first <= at < end), None)


lent = find_block
"""The old name, for tests of engines; it goes with interface 2.2."""


def attach(name: BlockName, *, private: bool = False) -> Tensor:
    """The reader's end: the block's bytes, `[num_bytes]` uint8, as long as the tensor lives.

    Args:
        name: from the owner.
        private: writes stay in this process; False: the owner sees them.

    Raises:
        AttachError: the block cannot be opened from here, or was replaced by another one.
    """
    try:
        fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AttachError(f"cannot open the source's shared memory at {name.path}: {error}") from error
    try:
        status = os.fstat(fd)
        if status.st_ino != name.inode or status.st_size < name.num_bytes:
            raise AttachError(f"{name.path} is no longer the block of {name.num_bytes} bytes that the source announced")
        block = mmap.mmap(fd, name.num_bytes, access=mmap.ACCESS_COPY if private else mmap.ACCESS_DEFAULT)
    finally:
        os.close(fd)
    return torch.frombuffer(block, dtype=torch.uint8)
