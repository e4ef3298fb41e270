"""A ring of slots in shared memory: one process fills them while another reads, without a call per slot.

The slots are in an unnamed block (`SharedBlock`); two pipes report which slots were filled and read. The reader opens
them as `/proc/PID/fd/N`, like the block. Therefore nothing can leak, waiting costs no CPU, and each end notices
immediately that the other one is gone, because its pipe is closed in any case.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError, BlockName, SharedBlock, attach

NUM_SLOTS = 4
"""Number of slots: one being filled, one being read, and spare ones for when either side is delayed."""
LOOK_S = 0.05
"""Seconds between a waiting writer's checks of whether it was closed or its process is ending."""
_FILLED = struct.Struct("<Qq?")
"""Stream, checksum, and whether the slot holds the text of an error instead. Shorter than PIPE_BUF: written whole."""


class RingClosedError(Exception):
    """The other end is gone, or this one was closed."""


class RingWriter:
    """The source's end. The reader's first credits report that it has attached; from then on only the reader has its
    ends of the pipes."""

    def __init__(self, slot_bytes: int) -> None:
        self._block = SharedBlock(NUM_SLOTS * slot_bytes, anonymous=True)
        self.slot_bytes = slot_bytes
        self._fds = _Descriptors(credits=os.pipe2(os.O_CLOEXEC), filled=os.pipe2(os.O_CLOEXEC))
        self._release = weakref.finalize(self, self._fds.close)
        self._closed = threading.Event()
        self._credits = self._count = 0

    def announcement(self) -> dict[str, Any]:
        """Plain values with which the reader finds the ring."""
        here, fds, name = f"/proc/{os.getpid()}/fd", self._fds, self._block.name
        return {
            "path": name.path,
            "inode": name.inode,
            "block_bytes": name.num_bytes,
            "slot_bytes": self.slot_bytes,
            "credits": f"{here}/{fds.credits[1]}",
            "credits_inode": fds.inodes[0],
            "filled": f"{here}/{fds.filled[0]}",
            "filled_inode": fds.inodes[1],
        }

    @property
    def alive(self) -> bool:
        """False once the reader is gone or this end was closed."""
        return not self._closed.is_set() and not (self._fds.attached and _hung_up(self._fds.credits[0]))

    def next_slot(self, timeout_s: float) -> Tensor:
        """Waits for a free slot, `[slot_bytes]` uint8.

        Raises:
            RingClosedError: the reader is gone, this end was closed, or nothing was read for `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not self._credits:
            if self._closed.is_set() or time.monotonic() > end or not threading.main_thread().is_alive():
                raise RingClosedError
            if not _wait(self._fds.credits[0], LOOK_S):
                continue
            given = os.read(self._fds.credits[0], 64)
            if not given:
                raise RingClosedError
            self._credits += len(given)
            self._fds.let_go_of_reader()
        start = self._count % NUM_SLOTS * self.slot_bytes
        return self._block.tensor[start : start + self.slot_bytes]

    def post(self, stream: int, checksum: int) -> None:
        """Passes the slot from `next_slot` to the reader."""
        self._report(stream, checksum, False)

    def post_error(self, stream: int, message: str) -> None:
        """Ends a stream: the reader raises with this message."""
        text = message.encode()[: self.slot_bytes - 1] + b"\0"
        self.next_slot(LOOK_S)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._report(stream, 0, True)

    def close(self) -> None:
        """Ends waiting calls; the memory is freed with the last reference."""
        self._closed.set()

    def _report(self, stream: int, checksum: int, failed: bool) -> None:
        try:
            os.write(self._fds.filled[1], _FILLED.pack(stream, checksum, failed))
        except BrokenPipeError:
            raise RingClosedError from None
        self._credits -= 1
        self._count += 1


class RingReader:
    """The target's end."""

    def __init__(self, announced: Mapping[str, Any]) -> None:
        """Raises `AttachError` if this process cannot open the writer's descriptors."""
        self._block = attach(BlockName(announced["path"], announced["inode"], announced["block_bytes"], unlink=False))
        self._slot_bytes = announced["slot_bytes"]
        filled = _open_pipe(announced["filled"], announced["filled_inode"], os.O_RDONLY)
        try:
            credits = _open_pipe(announced["credits"], announced["credits_inode"], os.O_WRONLY)
        except AttachError:
            os.close(filled)
            raise
        self._filled, self._credits, self._count = filled, credits, 0
        self._release = weakref.finalize(self, _close_all, (filled, credits))
        self._give(NUM_SLOTS)

    def take(self, stream: int, timeout_s: float) -> tuple[Tensor, int]:
        """The next slot of a stream, `[slot_bytes]` uint8, with its checksum; it may be read until `free`. Slots of
        earlier, abandoned streams are skipped.

        Raises:
            WeightSyncError: the writer failed, is gone, or sent nothing for `timeout_s`.
        """
        while True:
            if not _wait(self._filled, timeout_s):
                raise WeightSyncError(f"the source sent nothing for {timeout_s:.1f} s")
            header = os.read(self._filled, _FILLED.size)
            if len(header) < _FILLED.size:
                raise WeightSyncError("the source is gone")
            found, checksum, failed = _FILLED.unpack(header)
            start = self._count % NUM_SLOTS * self._slot_bytes
            slot = self._block[start : start + self._slot_bytes]
            self._count += 1
            if found < stream:
                self.free()
            elif failed:
                raise WeightSyncError(bytes(slot.numpy()).split(b"\0", 1)[0].decode(errors="replace"))
            else:
                return slot, checksum

    def free(self) -> None:
        """Returns the slot that was taken first to the writer."""
        with contextlib.suppress(BrokenPipeError):  # Slots that it filled before it ended can still be read.
            self._give(1)

    def close(self) -> None:
        """Closes this end; the writer notices at once."""
        self._release()

    def _give(self, count: int) -> None:
        os.write(self._credits, b"\1" * count)


class _Descriptors:
    """A writer's ends of both pipes; until the reader has attached, also the reader's ends."""

    def __init__(self, credits: tuple[int, int], filled: tuple[int, int]) -> None:
        self.credits, self.filled = credits, filled
        self.inodes = os.fstat(credits[0]).st_ino, os.fstat(filled[0]).st_ino
        self.attached = False

    def let_go_of_reader(self) -> None:
        if not self.attached:
            self.attached = True
            _close_all((self.credits[1], self.filled[0]))

    def close(self) -> None:
        self.let_go_of_reader()
        _close_all((self.credits[0], self.filled[1]))


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _wait(descriptor: int, timeout_s: float) -> bool:
    """Waits until there is something to read or the other end is closed; False on timeout."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _open_pipe(path: str, inode: int, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise AttachError(f"cannot open the source's pipe at {path}: {error}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
        os.close(descriptor)
        raise AttachError(f"{path} is no longer the pipe that the source announced")
    return descriptor
