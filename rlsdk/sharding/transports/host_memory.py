"""Transports through the memory of one host: views within a process, shared memory, files; and within a call's
answer."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    WeightLayout,
    WeightShard,
)
from rlsdk.kit.ranks.shared_memory import BlockName, SharedBlock, attach, find_block
from rlsdk.sharding.transports.ring import RingClosedError, RingReader, RingWriter
from rlsdk.sharding.transports.transport import Outgoing, Transport
from rlsdk.sharding.transports.wire import (
    GROUP_BYTES,
    Metas,
    announcement,
    bucket_offsets,
    check_announcement,
    check_group,
    checked,
    fill,
    fill_group,
    filled,
    groups,
    slots,
)


class InProcessTransport(Transport):
    """Both ends in one process: the target gets views of the source's own memory, converted only if necessary."""

    name = "in_process"
    stays_on_device = True
    call_bytes = None

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.process == target.process

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        return [
            {"tensors": [s.tensor.detach().to(getattr(torch, d)) for s, d in zip(b.take(), b.dtypes, strict=True)]}
            for b in buckets
        ]

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        return iter(handle["tensors"])


class SharedMemoryTransport(Transport):
    """Two processes on one node. Weights that the engine keeps in shared memory (`kit.ranks.shared_memory.share`) are
    read in place: the only copy is the target's. The source streams other weights, group by group, through a ring of
    slots that both map: it fills one slot while the target reads another.

    Mappings are kept between syncs. The memory has no name, so nothing leaks, however either process ends.
    """

    name = "shared_memory"
    call_bytes = None

    def __init__(self) -> None:
        self.in_place = False
        """Whether the last bucket of this target was read in place, without transfer memory."""
        self._ring: RingWriter | None = None
        self._streams = 0
        self._streaming: threading.Thread | None = None
        self._reader: tuple[tuple[str, int], RingReader] | None = None
        self._attached: dict[BlockName, Tensor] = {}

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.node == target.node and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        handles: list[Mapping[str, Any]] = []
        streamed: list[tuple[int, Outgoing]] = []
        for bucket in buckets:
            _, num_bytes = bucket_offsets(bucket.metas)
            if bucket.is_here and (views := _lent_views(bucket.take(), bucket.dtypes)) is not None:
                handles.append({"views": views, **announcement(num_bytes)})
                continue
            self._streams += 1
            streamed.append((self._streams, bucket))
            handles.append({"stream": self._streams, **announcement(num_bytes)})
        if not streamed:
            return handles
        ring = self._ring_of(max(map(_largest_group, (bucket for _, bucket in streamed))))
        work = (ring, streamed, self._streaming)
        self._streaming = threading.Thread(target=self._stream, args=work, name="rlsdk-stream")
        self._streaming.start()
        return [{**handle, **ring.announcement()} if "stream" in handle else handle for handle in handles]

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        check_announcement(handle, metas)
        self.in_place = "views" in handle
        if self.in_place:
            return iter([self._view(view, meta) for view, meta in zip(handle["views"], metas, strict=True)])
        ring = handle["filled"], handle["filled_inode"]
        if self._reader is None or self._reader[0] != ring:
            self._reader = ring, RingReader(handle)
        return self._take(self._reader[1], handle["stream"], metas)

    def close(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
        if self._ring is not None:
            self._ring.close()
        if self._streaming is not None:
            self._streaming.join(self.timeout_s)
        self._ring = self._reader = self._streaming = None
        self._attached.clear()

    def _view(self, view: Mapping[str, Any], meta: tuple[tuple[int, ...], str]) -> Tensor:
        """A tensor of the source, mapped in place. The mapping is private: writes of an engine would not change trained
        weights, and fingerprints would reveal them."""
        name = BlockName(view["path"], view["inode"], view["block_bytes"], unlink=False)
        if name not in self._attached:
            self._attached = {known: block for known, block in self._attached.items() if known.path != name.path}
            self._attached[name] = attach(name, private=True)
        shape, dtype = meta
        values = self._attached[name].view(getattr(torch, dtype))
        return values.as_strided(shape, view["strides"], view["start"] // values.element_size())

    def _ring_of(self, slot_bytes: int) -> RingWriter:
        """The ring, or a new one for larger groups or after a target has abandoned the old one."""
        if self._ring is None or self._ring.slot_bytes < slot_bytes or not self._ring.alive:
            self._ring, self._streaming = RingWriter(max(slot_bytes, GROUP_BYTES)), None
        return self._ring

    def _stream(
        self, ring: RingWriter, buckets: Sequence[tuple[int, Outgoing]], before: threading.Thread | None
    ) -> None:
        """Runs on a thread, after earlier streams. If the target is gone, errors are dropped."""
        if before is not None:
            before.join()
        with contextlib.suppress(RingClosedError):
            for stream, bucket in buckets:
                try:
                    self._fill(ring, stream, bucket)
                except RingClosedError:
                    ring.close()
                    return
                except Exception as error:
                    ring.post_error(stream, f"{type(error).__name__}: {error}")
                    return

    def _fill(self, ring: RingWriter, stream: int, bucket: Outgoing) -> None:
        """Posts one bucket, group by group."""
        offsets, num_bytes = bucket_offsets(bucket.metas)
        shards, dtypes = bucket.take(), bucket.dtypes
        for tensors, span in groups(offsets, num_bytes):
            slot = ring.next_slot(self.timeout_s)[: span.stop - span.start]
            ring.post(stream, fill_group(slot, offsets[tensors], shards[tensors], dtypes[tensors]))

    def _take(self, reader: RingReader, stream: int, metas: Metas) -> Iterator[Tensor]:
        offsets, num_bytes = bucket_offsets(metas)
        for tensors, span in groups(offsets, num_bytes):
            slot, sent = reader.take(stream, self.timeout_s)
            data = slot[: span.stop - span.start]
            yield from slots(data, offsets[tensors], metas[tensors])
            check_group(data, sent)
            reader.free()


def _largest_group(bucket: Outgoing) -> int:
    """Bytes of a slot that fits every group of a bucket."""
    return max((span.stop - span.start for _, span in groups(*bucket_offsets(bucket.metas))), default=0)


def _lent_views(shards: Sequence[WeightShard], dtypes: Sequence[str]) -> list[dict[str, Any]] | None:
    """Positions of the shards in shared memory; None unless all are there, in the requested dtypes."""
    views = []
    for shard, dtype in zip(shards, dtypes, strict=True):
        place = find_block(shard.tensor) if shard.tensor.dtype is getattr(torch, dtype) else None
        if place is None:
            return None
        name, start = place
        views.append(
            {
                "path": name.path,
                "inode": name.inode,
                "block_bytes": name.num_bytes,
                "start": start,
                "strides": shard.tensor.stride(),
            }
        )
    return views


class SharedFileTransport(Transport):
    """Two processes on one node if the target may not read the source's /proc: the source copies into files in /dev/shm
    that both map, and that the target unlinks as soon as they are attached. Two files alternate, and are kept between
    syncs."""

    name = "shared_file"

    def __init__(self) -> None:
        self._blocks: list[SharedBlock | None] = [None, None]
        self._turn = 0
        self._attached: dict[str, tuple[BlockName, Tensor]] = {}

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.node == target.node and hasattr(os, "posix_fallocate")

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        return [self._export(bucket) for bucket in buckets]

    def _export(self, bucket: Outgoing) -> Mapping[str, Any]:
        offsets, num_bytes = bucket_offsets(bucket.metas)
        block = self._next_block(num_bytes)
        sums = fill(block.tensor[:num_bytes], offsets, bucket.take(), bucket.dtypes)
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
            block = self._blocks[self._turn] = SharedBlock(num_bytes, anonymous=False)
        return block


class InlineTransport(Transport):
    """Any two places: the bytes are part of the handle, and are sent with the answer of the call."""

    name = "inline"

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return True

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        handles: list[Mapping[str, Any]] = []
        for bucket in buckets:
            data, sums = filled(bucket)
            # A numpy array instead of bytes: pickle protocol 5 transfers it without a copy.
            handles.append({"data": data.numpy(), **announcement(len(data), sums)})
        return handles

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        data = handle["data"]
        # An object store returns read-only memory: an engine that wrote into it would crash with a segmentation fault.
        return checked(torch.from_numpy(data if data.flags.writeable else data.copy()), handle, metas)
