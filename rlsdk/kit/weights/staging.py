"""Staging memory for weights that other processes load: anonymous memory, filled here and read there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsdk.interfaces import Box, WeightShard

ALIGNMENT = 64
BlockName = tuple[int, int, int]
"""Process id, file descriptor in it, number of bytes."""


class Entry(NamedTuple):
    """A shard in a block. Plain values, since some ways to a worker reduce everything to lists."""

    name: str
    start: Sequence[int]
    size: Sequence[int]
    """Size of the box that begins at `start`."""
    dtype: str
    offset: int
    """Offset in bytes in the block."""


class Staging:
    """One block that is filled and sent repeatedly. Freed by the kernel, however either process ends."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("rlsdk-weights")
        os.ftruncate(self._file, num_bytes)
        self._map = mmap.mmap(self._file, num_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.name: BlockName = (os.getpid(), self._file, num_bytes)
        self.entries: list[Entry] = []
        self._used = 0

    def put(self, shard: WeightShard) -> bool:
        """Copies a shard into the block; False if it does not fit any more."""
        size = shard.tensor.numel() * shard.tensor.element_size()
        if self._used + size > self.name[2]:
            return False
        place = self._bytes[self._used : self._used + size].view(shard.tensor.dtype).view(shard.box.size)
        place.copy_(shard.tensor)
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        self.entries.append(Entry(shard.name, shard.box.offset, shard.box.size, dtype, self._used))
        self._used = -(-(self._used + size) // ALIGNMENT) * ALIGNMENT
        return True

    def values(self) -> bytes:
        """A copy of the content, for processes that cannot map this memory."""
        return bytes(self._map[: self._used])

    def clear(self) -> None:
        self.entries, self._used = [], 0

    def close(self) -> None:
        del self._bytes
        self._map.close()
        os.close(self._file)


@contextmanager
def attached(block: BlockName, entries: Sequence[Sequence[Any]]) -> Iterator[Iterator[WeightShard]]:
    """The shards of another process's block, as views of it. `entries` are the values of its `Entry`s."""
    process, descriptor, num_bytes = block
    with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file, mmap.mmap(file.fileno(), num_bytes) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        try:
            yield (_shard(whole, Entry(*values)) for values in entries)
        finally:
            del whole


def copied(values: bytes, entries: Sequence[Sequence[Any]]) -> Iterator[WeightShard]:
    """The shards of a block whose values were sent along (`Staging.values`)."""
    whole = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    return (_shard(whole, Entry(*entry)) for entry in entries)


def _shard(whole: Tensor, entry: Entry) -> WeightShard:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    box = Box(tuple(entry.start), tuple(entry.size))
    place = whole[entry.offset : entry.offset + box.numel * dtype.itemsize]
    return WeightShard(name=entry.name, box=box, tensor=place.view(dtype).view(box.size))


def batches(shards: Iterator[WeightShard], num_bytes: int) -> Iterator[Staging]:
    """Fills a block repeatedly, and yields it whenever it is full. A shard that is larger than the block is split.

    Raises:
        ValueError: a block is smaller than one element.
    """
    block = Staging(num_bytes)
    try:
        for shard in shards:
            for part in cut(shard, num_bytes):
                if not block.put(part):
                    yield block
                    block.clear()
                    if not block.put(part):
                        raise ValueError(f"a block of {num_bytes} bytes has no room for {part.name!r}, {part.box}")
        if block.entries:
            yield block
    finally:
        block.close()


def cut(shard: WeightShard, num_bytes: int) -> Iterator[WeightShard]:
    """Splits a tensor into pieces of at most this many bytes along the first dimension; if one row is larger, along the
    next too."""
    size = shard.tensor.numel() * shard.tensor.element_size()
    axis = next((at for at, length in enumerate(shard.box.size) if length > 1), None)
    if size <= num_bytes or axis is None:
        yield shard
        return
    rows = shard.box.size[axis]
    at_once = max(1, num_bytes // (size // rows))
    for start in range(0, rows, at_once):
        length = min(at_once, rows - start)
        offset, sizes = list(shard.box.offset), list(shard.box.size)
        offset[axis] += start
        sizes[axis] = length
        box, tensor = Box(tuple(offset), tuple(sizes)), shard.tensor.narrow(axis, start, length)
        yield from cut(WeightShard(name=shard.name, box=box, tensor=tensor), num_bytes)
