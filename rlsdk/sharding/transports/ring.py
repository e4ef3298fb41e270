"""A ring of slots: one process fills them while others read, without a call per slot.

The slots are in memory that the readers open (`ring_memory`). Each reader has two pipes of its own: one reports which
slots were filled, the other returns them. A slot is filled again when every reader has returned it; a reader that is
gone no longer counts. Readers open the pipes as `/proc/PID/fd/N`. Therefore nothing can leak, waiting costs no CPU, and
each end notices immediately that the other one is gone, because its pipe is closed in any case.

Readers may attach at any time: a late one finds the slots from the first on, since none is filled again before it has
returned it.
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
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding.transports.ring_memory import RingMemory, open_memory

LOOK_S = 0.05
"""Seconds between a waiting writer's checks of whether it was closed or its process is ending."""
ATTACH_S = 30.0
"""Longest time in seconds that readers are held up by one that has not asked for the stream: it may have ended."""
_FILLED = struct.Struct("<Qq?")
"""Stream, checksum, and whether the slot holds the text of an error instead. Shorter than PIPE_BUF: written whole."""
_ATTACHED, _RETURNED = b"a", b"r"
"""What a reader writes: once that it has opened the ring, then for every slot that it returns."""


class RingClosedError(Exception):
    """No reader is left, or this end was closed."""


class PipeGoneError(AttachError):
    """Another process has attached in this reader's place, or the writer has dropped it."""


class RingWriter:
    """The source's end. It starts before readers attach; once one has, only that reader has its ends of its pipes."""

    def __init__(self, memory: RingMemory, num_readers: int = 1) -> None:
        self.memory = memory
        self._exported = {
            **memory.export(),
            "kind": memory.kind,
            "num_slots": memory.num_slots,
            "slot_bytes": memory.slot_bytes,
        }
        self._readers = [_ReaderPipes(memory.num_slots) for _ in range(num_readers)]
        self.asked = set(range(num_readers))
        """Readers that are known to take the current stream. Others are waited for during `ATTACH_S` only."""
        self.excused: set[int] = set()
        """Readers that are not waited for: they left, or did not come in time."""
        self._reading = threading.Lock()
        self._release = weakref.finalize(self, _close_readers, self._readers)
        self._closed = threading.Event()
        self._count = 0

    def export(self, reader: int = 0) -> dict[str, Any]:
        """Plain values with which this reader opens the ring."""
        here, pipes = f"/proc/{os.getpid()}/fd", self._readers[reader]
        return {
            **self._exported,
            "credits": f"{here}/{pipes.credits[1]}",
            "credits_inode": pipes.inodes[0],
            "filled": f"{here}/{pipes.filled[0]}",
            "filled_inode": pipes.inodes[1],
        }

    @property
    def alive(self) -> bool:
        """False once a reader is gone unexpectedly or this end was closed: a new ring is needed for all of them."""
        self._collect(0)
        gone = (at for at, reader in enumerate(self._readers) if reader.gone and at not in self.excused)
        return not self._closed.is_set() and next(gone, None) is None

    @property
    def in_use(self) -> bool:
        """Whether a reader is attached."""
        self._collect(0)
        return any(reader.attached and not reader.gone for reader in self._readers)

    def next_slot(self, timeout_s: float) -> Tensor:
        """Waits for a slot that every reader has returned, `[slot_bytes]` uint8.

        Raises:
            RingClosedError: all readers are gone, this end was closed, or nothing was returned for `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        self._collect(0)
        while not all(reader.left or reader.gone for reader in self._readers):
            if self._closed.is_set() or time.monotonic() > end or not threading.main_thread().is_alive():
                raise RingClosedError
            self._collect(LOOK_S)
            if time.monotonic() > end - timeout_s + ATTACH_S:
                for reader in set(range(len(self._readers))) - self.asked:
                    self.leave(reader)
        self._check_read()
        start = self._count % self.memory.num_slots * self.memory.slot_bytes
        return self.memory.data[start : start + self.memory.slot_bytes]

    def post(self, stream: int, checksum: int) -> None:
        """Passes the slot from `next_slot` to the readers."""
        self._report(stream, checksum, False)

    def post_error(self, stream: int, message: str) -> None:
        """Ends a stream: the readers raise with this message."""
        text = message.encode()[: self.memory.slot_bytes - 1] + b"\0"
        self.next_slot(LOOK_S)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.memory.finish()
        self._report(stream, 0, True)

    def leave(self, reader: int) -> None:
        """This reader will not attach, or takes no more: it is not waited for."""
        with self._reading:
            self.excused.add(reader)
            self._readers[reader].gone = True

    def close(self) -> None:
        """Ends waiting calls; the memory is freed with the last reference."""
        self._closed.set()

    def _collect(self, timeout_s: float) -> None:
        """Waits until a reader returns slots or ends, and counts what all of them have returned."""
        if timeout_s:
            self._ready(timeout_s)
        with self._reading:  # Only one thread looks and reads: a read never waits.
            while ready := self._ready(0):  # Behind what a reader returned may be its end.
                for reader in ready:
                    reader.collect()

    def _ready(self, timeout_s: float) -> list[_ReaderPipes]:
        """Readers that have returned slots or are gone."""
        poll = select.poll()
        of_descriptor = {reader.credits[0]: reader for reader in self._readers if not reader.gone}
        for descriptor in of_descriptor:
            poll.register(descriptor, select.POLLIN)
        return [of_descriptor[descriptor] for descriptor, _ in poll.poll(timeout_s * 1000)]

    def _report(self, stream: int, checksum: int, failed: bool) -> None:
        for reader in self._readers:
            reader.tell(_FILLED.pack(stream, checksum, failed))
        self._count += 1
        self._check_read()

    def _check_read(self) -> None:
        if all(reader.gone for reader in self._readers):
            raise RingClosedError


class RingReader:
    """A target's end."""

    def __init__(self, exported: Mapping[str, Any], device: torch.device | None = None) -> None:
        """
        Args:
            exported: from `RingWriter.export`, of this reader alone.
            device: this process's own device.

        Raises:
            AttachError: this process cannot open the writer's memory or pipes.
        """
        self._data = open_memory(exported, device)
        self._slot_bytes, self._num_slots = exported["slot_bytes"], exported["num_slots"]
        filled = _open_pipe(exported["filled"], exported["filled_inode"], os.O_RDONLY)
        try:
            credits = _open_pipe(exported["credits"], exported["credits_inode"], os.O_WRONLY)
        except AttachError:
            os.close(filled)
            raise
        self._filled, self._credits, self._count = filled, credits, 0
        self._release = weakref.finalize(self, _close_all, (filled, credits))
        os.write(self._credits, _ATTACHED)

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
            start = self._count % self._num_slots * self._slot_bytes
            slot = self._data[start : start + self._slot_bytes]
            self._count += 1
            if found < stream:
                self.free()
            elif failed:
                text = bytes(slot.cpu().numpy()).split(b"\0", 1)[0].decode(errors="replace")
                self.free()
                raise WeightSyncError(text)
            else:
                return slot, checksum

    def free(self) -> None:
        """Returns the slot that was taken first to the writer."""
        with contextlib.suppress(BrokenPipeError):  # Slots that it filled before it ended can still be read.
            os.write(self._credits, _RETURNED)

    def close(self) -> None:
        """Closes this end; the writer notices at once."""
        self._release()


class _ReaderPipes:
    """A writer's ends of one reader's pipes; until that reader has attached, also the reader's ends."""

    def __init__(self, num_slots: int) -> None:
        self.credits, self.filled = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        self.inodes = os.fstat(self.credits[0]).st_ino, os.fstat(self.filled[0]).st_ino
        self.left = num_slots
        """Slots that may be filled for this reader."""
        self.gone = self.attached = False

    def collect(self) -> None:
        """Counts the slots that the reader has returned since the last call."""
        given = os.read(self.credits[0], 64)
        self.left += given.count(_RETURNED)
        self.gone = not given
        if given and not self.attached:
            self.attached = True
            _close_all((self.credits[1], self.filled[0]))

    def tell(self, report: bytes) -> None:
        """Reports a filled slot, unless the reader is gone."""
        if self.gone:
            return
        try:
            os.write(self.filled[1], report)
        except BrokenPipeError:
            self.gone = True
        self.left -= 1

    def close(self) -> None:
        if not self.attached:
            _close_all((self.credits[1], self.filled[0]))
        _close_all((self.credits[0], self.filled[1]))


def _close_readers(readers: list[_ReaderPipes]) -> None:
    for reader in readers:
        reader.close()


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _wait(descriptor: int, timeout_s: float) -> bool:
    """Waits until there is something to read or the other end is closed; False on timeout."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _open_pipe(path: str, inode: int, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise PipeGoneError(f"cannot open the source's pipe at {path}: {error}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
        os.close(descriptor)
        raise PipeGoneError(f"{path} is no longer the pipe that the source announced")
    return descriptor
