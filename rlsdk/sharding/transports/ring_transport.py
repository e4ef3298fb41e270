"""Two processes of one node: weights are read where they are, or come through a ring of slots."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import WeightLayout, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import BlockName, attach, find_block
from rlsdk.sharding.transports.ring import PipeGoneError, RingClosedError, RingReader, RingWriter
from rlsdk.sharding.transports.ring_memory import CudaMemory, HostMemory, RingMemory
from rlsdk.sharding.transports.transport import Outgoing, Transport, use_device
from rlsdk.sharding.transports.wire import (
    GROUP_BYTES,
    Metas,
    announcement,
    bucket_offsets,
    check_announcement,
    check_group,
    fill_group,
    groups,
    slots,
)


class RingTransport(Transport):
    """Processes of one node. Weights that the engine keeps in shared memory (`kit.ranks.shared_memory.share`) are read
    in place: the only copy is the target's. The source streams other weights, group by group, through a ring of slots
    that both map: it fills one slot while targets read another.

    Targets that want the same buckets share one ring: the source fills each slot once for all of them. Mappings are
    kept between syncs. The memory has no name, so nothing leaks, however any of the processes ends.
    """

    name = "ring"
    call_bytes = None
    shares_slots = True
    num_slots = 4
    """One being filled, one being read, and spare ones for when either side is delayed."""
    group_bytes = GROUP_BYTES
    """Bytes of a slot, or one tensor if that is larger."""

    def __init__(self, num_readers: int = 1) -> None:
        """`num_readers`: on the source's end, targets that take the same buckets."""
        self.in_place = False
        """Whether the last bucket of this target was read in place, without transfer memory."""
        self.num_readers = num_readers
        self._asked: set[int] = set()
        """Readers that have asked for the current buckets."""
        self._left: set[int] = set()
        """Readers that take their weights otherwise."""
        self._metas: list[Metas] = []
        """Of the current buckets, whose shards are not kept: their memory is the engine's."""
        self._handles: list[Mapping[str, Any]] = []
        self._ring: RingWriter | None = None
        self._former: list[tuple[RingWriter, threading.Thread]] = []
        """Rings of earlier buckets that may still be read."""
        self._streams = 0
        self._streaming: threading.Thread | None = None
        self._reader: tuple[tuple[str, int], RingReader] | None = None
        self._attached: dict[BlockName, Tensor] = {}

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.node == target.node and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

    def start_sync(self) -> None:
        """A reader that did not ask in the sync before may be the first to ask in this one."""
        self._drop_unasked_ring()
        self._asked = set()

    def export(self, buckets: Sequence[Outgoing], reader: int = 0) -> list[Mapping[str, Any]]:
        """As `Transport.export`, for one of the readers. The first one that asks starts the stream; a reader that asks
        again asks for the next buckets.

        Raises:
            WeightSyncError: readers of one ring ask for different buckets.
        """
        if self._ring is not None:
            self._left |= self._ring.excused
        if reader in self._left:
            raise PipeGoneError("this target takes its weights from a ring of its own")
        if not self._asked or reader in self._asked:
            self._drop_unasked_ring()
            self._asked, self._metas = {reader}, [bucket.metas for bucket in buckets]
            self._handles = self._begin(buckets)
        elif [bucket.metas for bucket in buckets] != self._metas:
            raise WeightSyncError("targets that share a ring asked for different buckets")
        else:
            self._asked.add(reader)
            if self._ring is not None:
                self._ring.asked.add(reader)
        ring = {} if self._ring is None else self._ring.export(reader)
        return [{**handle, **ring} if "stream" in handle else handle for handle in self._handles]

    def leave(self, reader: int) -> None:
        """This reader takes its weights otherwise: the others no longer wait for it."""
        self._left.add(reader)
        if self._ring is not None:
            self._ring.leave(reader)

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        check_announcement(handle, metas)
        self.in_place = "views" in handle
        if self.in_place:
            return iter([self._view(view, meta) for view, meta in zip(handle["views"], metas, strict=True)])
        ring = handle["filled"], handle["filled_inode"]
        if self._reader is None or self._reader[0] != ring:
            self._reader = ring, RingReader(handle, self.device)
        return self._take(self._reader[1], handle["stream"], metas)

    def close(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
        former, self._former = self._former, []
        if self._ring is not None and self._streaming is not None:
            former.append((self._ring, self._streaming))
        for ring, _ in former:
            ring.close()
        for _, thread in former:
            thread.join(self.timeout_s)
        self._ring = self._reader = self._streaming = None
        self._metas, self._handles, self._asked = [], [], set()
        self._attached.clear()

    def _memory(self, slot_bytes: int, device: torch.device | None) -> RingMemory:
        """New slots for shards on this device."""
        return HostMemory(self.num_slots, slot_bytes)

    def _begin(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        """Starts to stream what cannot be read in place; handles without the ring's own values."""
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
        if streamed:
            ring = self._ring_of([bucket for _, bucket in streamed])
            work = (ring, streamed, self._streaming)
            self._streaming = threading.Thread(target=self._stream, args=work, name="rlsdk-stream")
            self._streaming.start()
        return handles

    def _view(self, view: Mapping[str, Any], meta: tuple[tuple[int, ...], str]) -> Tensor:
        """A tensor of the source, mapped in place. The mapping is private: writes of an engine would not change trained
        weights, and fingerprints would reveal them."""
        name = BlockName(view["path"], view["inode"], view["block_bytes"])
        if name not in self._attached:
            self._attached = {known: block for known, block in self._attached.items() if known.path != name.path}
            self._attached[name] = attach(name, private=True)
        shape, dtype = meta
        values = self._attached[name].view(getattr(torch, dtype))
        return values.as_strided(shape, view["strides"], view["start"] // values.element_size())

    def _ring_of(self, buckets: Sequence[Outgoing]) -> RingWriter:
        """The ring, or a new one for larger groups or after a target has abandoned the old one."""
        slot_bytes = max(GROUP_BYTES, *(self._largest_group(bucket) for bucket in buckets))
        if self._ring is None or self._ring.memory.slot_bytes < slot_bytes or not self._ring.alive:
            self._drop_ring()
            device = next((bucket.device for bucket in buckets if bucket.device is not None), None)
            with use_device(device):
                self._ring = RingWriter(self._memory(slot_bytes, device), self.num_readers)
            for reader in self._left:
                self._ring.leave(reader)
        self._ring.asked = set(self._asked)
        return self._ring

    def _largest_group(self, bucket: Outgoing) -> int:
        """Bytes of a slot that fits every group of a bucket."""
        parts = groups(*bucket_offsets(bucket.metas), self.group_bytes)
        return max((span.stop - span.start for _, span in parts), default=0)

    def _drop_unasked_ring(self) -> None:
        """Drops the ring of buckets for which some reader never asked: their sync was broken off."""
        if self._ring is not None:
            self._left |= self._ring.excused
        if self._asked and len(self._asked | self._left) < self.num_readers:
            self._drop_ring()

    def _drop_ring(self) -> None:
        """Makes room for another ring. Readers that still read from this one get all that they asked for."""
        if self._ring is not None and self._streaming is not None and self._ring.in_use:
            self._former = [(ring, thread) for ring, thread in self._former if thread.is_alive()]
            self._former.append((self._ring, self._streaming))
        elif self._ring is not None:
            self._ring.close()
        self._ring = self._streaming = None

    def _stream(
        self, ring: RingWriter, buckets: Sequence[tuple[int, Outgoing]], before: threading.Thread | None
    ) -> None:
        """Runs on a thread, after earlier streams. If all targets are gone, errors are dropped."""
        if before is not None:
            before.join()
        with contextlib.suppress(RingClosedError):
            for stream, bucket in buckets:
                try:
                    with use_device(bucket.device):
                        self._fill(ring, stream, bucket)
                except RingClosedError:
                    ring.close()
                    return
                except Exception as error:
                    ring.post_error(stream, f"{type(error).__name__}: {error}")
                    return

    def _fill(self, ring: RingWriter, stream: int, bucket: Outgoing) -> None:
        """Posts one bucket, group by group. The checksum of a group waits until its copy has finished."""
        offsets, num_bytes = bucket_offsets(bucket.metas)
        shards, dtypes = bucket.take(), bucket.dtypes
        for tensors, span in groups(offsets, num_bytes, self.group_bytes):
            slot = ring.next_slot(self.timeout_s)[: span.stop - span.start]
            ring.post(stream, fill_group(slot, offsets[tensors], shards[tensors], dtypes[tensors]))

    def _take(self, reader: RingReader, stream: int, metas: Metas) -> Iterator[Tensor]:
        offsets, num_bytes = bucket_offsets(metas)
        for tensors, span in groups(offsets, num_bytes, self.group_bytes):
            slot, sent = reader.take(stream, self.timeout_s)
            data = slot[: span.stop - span.start]
            yield from slots(data, offsets[tensors], metas[tensors])
            check_group(data, sent)
            reader.free()


class DeviceRingTransport(RingTransport):
    """Processes of one node whose weights are on its GPUs, any two of them or the same one: the slots are device
    memory, which targets open by CUDA IPC and copy from directly. The same ring otherwise; not yet run on a device. If
    the memory cannot be opened, the sync continues through the host."""

    name = "device_ring"
    stays_on_device = True
    num_slots = 3
    group_bytes = 32 << 20
    """Each group makes one host wait on either side, so that groups are large."""

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        # CUDA refuses a handle in the process that exported it.
        apart = source.node == target.node and source.process != target.process
        return apart and source.device.startswith("cuda") and target.device.startswith("cuda")

    def _memory(self, slot_bytes: int, device: torch.device | None) -> RingMemory:
        if device is None or device.type != "cuda":
            raise WeightSyncError(f"weights that were planned to stay on a GPU are on {device}")
        return CudaMemory(self.num_slots, slot_bytes, device)


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
