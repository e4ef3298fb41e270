"""The ways a bucket's bytes can go. One object per (source, target) at each end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    DTYPE_BYTES,
    ConfigError,
    Transport,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    nearest,
)
from rlsdk.sharding.memory import BlockName, SharedBlock, attach

ALIGNMENT = 64
"""Every tensor of a bucket starts at a multiple of this: a cache line, and a whole number of elements of any dtype."""

GROUP_BYTES = 1 << 20
"""Copied and checked at once: fits the second-level cache."""

Metas = Sequence[tuple[tuple[int, ...], str]]


class InProcessTransport(Transport):
    """Both ends in one process: the target sees views of the source's own memory, converted only where it must be."""

    name = "in_process"

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.process == target.process

    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        return {"tensors": [s.tensor.detach().to(_dtype(d)) for s, d in zip(shards, dtypes, strict=True)]}

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        return iter(handle["tensors"])


class SharedMemoryTransport(Transport):
    """Two processes of one node: the source copies into a block that both map, the target reads it there.

    Two blocks take turns, and stay from one sync to the next: pages are taken and mapped once. Nothing has a name, so
    nothing is left behind, whatever ends either process.
    """

    name = "shared_memory"
    anonymous = True

    def __init__(self) -> None:
        self._blocks: list[SharedBlock | None] = [None, None]
        self._turn = 0
        self._attached: dict[str, tuple[BlockName, Tensor]] = {}

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.node == target.node and hasattr(os, "memfd_create")

    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        offsets, num_bytes = _offsets([(s.box.size, d) for s, d in zip(shards, dtypes, strict=True)])
        block = self._next_block(num_bytes)
        sums = _fill(block.tensor[:num_bytes], offsets, shards, dtypes)
        name = block.name
        return {
            "path": name.path,
            "inode": name.inode,
            "block_bytes": name.num_bytes,
            "unlink": name.unlink,
            "num_bytes": num_bytes,
            "checksums": sums,
        }

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        name = BlockName(handle["path"], handle["inode"], handle["block_bytes"], handle["unlink"])
        known, block = self._attached.get(name.path, (None, torch.empty(0)))
        if known != name:
            block = attach(name)
            self._attached[name.path] = (name, block)
        return _checked(block, handle, metas)

    def close(self) -> None:
        for block in self._blocks:
            if block is not None:
                block.close()
        self._blocks = [None, None]
        self._attached.clear()

    def _next_block(self, num_bytes: int) -> SharedBlock:
        self._turn = 1 - self._turn
        block = self._blocks[self._turn]
        if block is not None and block.name.num_bytes < num_bytes:
            block.close()
            block = None
        if block is None:
            block = self._blocks[self._turn] = SharedBlock(num_bytes, anonymous=self.anonymous)
        return block


class SharedFileTransport(SharedMemoryTransport):
    """As `SharedMemoryTransport`, through files in /dev/shm, for where the target may not look into the source's
    /proc. The target unlinks each file as soon as it is attached."""

    name = "shared_file"
    anonymous = False

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.node == target.node and hasattr(os, "posix_fallocate")


class InlineTransport(Transport):
    """Any two places: the bytes are part of the handle, and go the way that answers of calls go."""

    name = "inline"

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return True

    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        offsets, num_bytes = _offsets([(s.box.size, d) for s, d in zip(shards, dtypes, strict=True)])
        data = torch.empty(num_bytes, dtype=torch.uint8)
        sums = _fill(data, offsets, shards, dtypes)
        # A numpy array and not bytes: pickle protocol 5 moves it without a copy of its own.
        return {"data": data.numpy(), "num_bytes": num_bytes, "checksums": sums}

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        data = handle["data"]
        # An object store hands out read-only memory: an engine that wrote into it would die of a segmentation fault.
        return _checked(torch.from_numpy(data if data.flags.writeable else data.copy()), handle, metas)


TRANSPORTS: tuple[type[Transport], ...] = (
    InProcessTransport,
    SharedMemoryTransport,
    SharedFileTransport,
    InlineTransport,
)
"""In order of preference."""


def named_transports(names: Sequence[str] | None) -> tuple[type[Transport], ...]:
    """The transports of these names, in this order; all in order of preference where none are named.

    Raises:
        ConfigError: a name that is none.
    """
    if names is None:
        return TRANSPORTS
    known = {transport.name: transport for transport in TRANSPORTS}
    for name in names:
        if name not in known:
            raise ConfigError(f"transport {name!r} does not exist{nearest(name, known)}; known: {sorted(known)}")
    return tuple(known[name] for name in names)


def make_transport(name: str) -> Transport:
    """A fresh end of the transport of that name."""
    return named_transports([name])[0]()


def checksum(data: Tensor) -> int:
    """Sum of `[n]` uint8 data as 64-bit integers (n a multiple of 64): finds torn, stale and overwritten bytes at half
    the cost of a memcpy. That every element is in its place is for the fingerprints to say."""
    return int(data.view(torch.int64).sum())


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _offsets(metas: Metas) -> tuple[list[int], int]:
    """Where each tensor starts, and how many bytes they take with their gaps."""
    offsets, end = [], 0
    for shape, dtype in metas:
        offsets.append(end)
        size = DTYPE_BYTES[dtype]
        for n in shape:
            size *= n
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _slots(data: Tensor, offsets: Sequence[int], metas: Metas) -> list[Tensor]:
    """One view per tensor into the bytes of a bucket."""
    slots = []
    for start, (shape, dtype) in zip(offsets, metas, strict=True):
        numel = torch.Size(shape).numel()
        slots.append(data[start : start + numel * DTYPE_BYTES[dtype]].view(_dtype(dtype)).view(shape))
    return slots


def _groups(offsets: Sequence[int], num_bytes: int) -> list[tuple[slice, slice]]:
    """(tensors, bytes) of the runs that are copied and checked together: as many tensors as the cache holds."""
    groups, first = [], 0
    for at, end in enumerate([*offsets[1:], num_bytes], start=1):
        if end - offsets[first] >= GROUP_BYTES or at == len(offsets):
            groups.append((slice(first, at), slice(offsets[first], end)))
            first = at
    return groups


@torch.no_grad()
def _fill(data: Tensor, offsets: Sequence[int], shards: Sequence[WeightShard], dtypes: Sequence[str]) -> list[int]:
    """Copies and converts all shards, group by group in multi-tensor calls; returns the checksum of each group, taken
    while it is in the cache."""
    slots = _slots(data, offsets, [(shard.box.size, dtype) for shard, dtype in zip(shards, dtypes, strict=True)])
    sums = []
    for tensors, span in _groups(offsets, len(data)):
        torch._foreach_copy_(slots[tensors], [shard.tensor for shard in shards[tensors]])
        sums.append(checksum(data[span]))
    return sums


def _checked(data: Tensor, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
    """Views of a bucket's tensors; each group is checked as soon as whoever took its tensors asks for more: then its
    bytes are in the cache, and one that was overwritten while it was read is found as well."""
    offsets, num_bytes = _offsets(metas)
    if handle["num_bytes"] != num_bytes or len(data) < num_bytes:
        raise WeightSyncError(
            f"a bucket of {num_bytes} bytes was asked for, but the source announced {handle['num_bytes']}"
        )
    return _give(data, _slots(data, offsets, metas), _groups(offsets, num_bytes), handle["checksums"])


def _give(
    data: Tensor, slots: Sequence[Tensor], groups: Sequence[tuple[slice, slice]], sums: Sequence[int]
) -> Iterator[Tensor]:
    for (tensors, span), sent in zip(groups, sums, strict=True):
        yield from slots[tensors]
        found = checksum(data[span])
        if found != sent:
            raise WeightSyncError(
                f"{span.stop - span.start} bytes of a bucket arrived with checksum {found}, the source sent {sent}: "
                "they were overwritten or corrupted on the way"
            )
