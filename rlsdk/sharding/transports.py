"""The ways a bucket's bytes can go. One object per (source, target) at each end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    ConfigError,
    Transport,
    WeightLayout,
    WeightShard,
    nearest,
)
from rlsdk.sharding.memory import BlockName, SharedBlock, attach
from rlsdk.sharding.process_group import ProcessGroupTransport
from rlsdk.sharding.wire import Metas, announcement, bucket_offsets, checked, fill


class InProcessTransport(Transport):
    """Both ends in one process: the target sees views of the source's own memory, converted only where it must be."""

    name = "in_process"

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.process == target.process

    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        return {"tensors": [s.tensor.detach().to(getattr(torch, d)) for s, d in zip(shards, dtypes, strict=True)]}

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
        offsets, num_bytes = bucket_offsets([(s.box.size, d) for s, d in zip(shards, dtypes, strict=True)])
        block = self._next_block(num_bytes)
        sums = fill(block.tensor[:num_bytes], offsets, shards, dtypes)
        name = block.name
        return {
            "path": name.path,
            "inode": name.inode,
            "block_bytes": name.num_bytes,
            "unlink": name.unlink,
            **announcement(num_bytes, sums),
        }

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        name = BlockName(handle["path"], handle["inode"], handle["block_bytes"], handle["unlink"])
        known, block = self._attached.get(name.path, (None, torch.empty(0)))
        if known != name:
            block = attach(name)
            self._attached[name.path] = (name, block)
        return checked(block, handle, metas)

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
    """Any two places: the bytes are part of the handle, and go the way that answers of calls go. Between Ray workers
    that is the object store, as shared memory within a node."""

    name = "inline"

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return True

    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        offsets, num_bytes = bucket_offsets([(s.box.size, d) for s, d in zip(shards, dtypes, strict=True)])
        data = torch.empty(num_bytes, dtype=torch.uint8)
        sums = fill(data, offsets, shards, dtypes)
        # A numpy array and not bytes: pickle protocol 5 moves it without a copy of its own.
        return {"data": data.numpy(), **announcement(num_bytes, sums)}

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        data = handle["data"]
        # An object store hands out read-only memory: an engine that wrote into it would die of a segmentation fault.
        return checked(torch.from_numpy(data if data.flags.writeable else data.copy()), handle, metas)


TRANSPORTS: tuple[type[Transport], ...] = (
    InProcessTransport,
    SharedMemoryTransport,
    SharedFileTransport,
    InlineTransport,
    ProcessGroupTransport,
)
"""In order of preference. What stands behind one that reaches anywhere is taken only by name."""


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
