"""Remote memory access by NIXL: the target reads the source's memory without work by the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsdk.interfaces import WeightLayout, WeightShard, WeightSyncError
from rlsdk.sharding.transports import nixl_agent
from rlsdk.sharding.transports.nixl_agent import Agent, Runs, memory_kind
from rlsdk.sharding.transports.transport import Outgoing, Transport
from rlsdk.sharding.transports.wire import (
    ALIGNMENT,
    Metas,
    announcement,
    bucket_offsets,
    check_announcement,
    checked,
    fill,
    groups,
    slots,
)

MIN_RUN_BYTES = 4096
"""Shortest contiguous run of memory in bytes that is read in place; shards with shorter runs are packed by the source,
as each run is a request."""
SLOTS = 2
"""Slots for packed buckets: the target reads one while the source fills the other."""
HEAD_BYTES = 4096
"""Header before the slots: number of ready buckets, number of taken buckets, length of an error, and its text."""
READY, TAKEN, ERROR = range(3)
LOOK_S = 0.0005
"""Seconds between one side's checks of what the other wrote."""


class RemoteMemoryTransport(Transport):
    """Two processes anywhere that UCX can connect: by RDMA, TCP or shared memory. Used only if it is named explicitly,
    because both ends need the library.

    Weights that already have the requested dtype, in long runs of memory, are read in place: their memory is registered
    at the first sync, and each later sync reads it without a copy at the source. Weights that must be converted or
    packed go through two slots of registered memory: one is filled while the other is read. One call announces a whole
    version; ready and taken buckets are counted in registered memory, without further calls.

    Bytes that are read in place have no checksum, because their source does not read them: the receipt's fingerprints
    verify them, as with views in shared memory.
    """

    name = "nixl"
    call_bytes = None

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._lock = threading.Lock()
        self._numbers = 0
        """Number of exported buckets."""
        self._slots: _Slots | None = None
        self._abandoned: list[_Slots] = []
        """Slots into which a target that gave up may still write."""
        self._serving: _Serving | None = None
        self._staging = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        self._turn = 0
        self._word = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.process != target.process

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        agent = self._borrowed()
        self._end_serving()
        first, self._numbers = self._numbers, self._numbers + len(buckets)
        places = [_in_place(bucket) for bucket in buckets]
        packed = [bucket for bucket, place in zip(buckets, places, strict=True) if place is None]
        own = self._slots_of(agent, max(map(_slot_bytes, packed), default=0), _device_of(packed), first)
        for place in places:
            for shard in place or ():
                agent.register(shard.tensor)
        for device in {shard.tensor.device for place in places for shard in place or () if shard.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._serving = _Serving(own, first, list(zip(buckets, places, strict=True)), self.timeout_s)
        self._serving.start()
        handles: list[Mapping[str, Any]] = []
        for number, (bucket, place) in enumerate(zip(buckets, places, strict=True), start=first):
            where = (
                {"at": [_runs_of(s.tensor) for s in place], **_where(place)} if place is not None else own.where(number)
            )
            way = {"agent": agent.name, "number": number, "head": own.head.data_ptr(), **where}
            handles.append({**way, **announcement(bucket_offsets(bucket.metas)[1])})
        return [{**handles[0], "introduction": agent.introduction()}, *handles[1:]] if handles else []

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        num_bytes = check_announcement(handle, metas)
        num_groups = len(groups(*bucket_offsets(metas)))
        room = num_bytes if "at" in handle else num_bytes + _trailer_bytes(num_groups)
        if "introduction" in handle:
            self._turn = 0  # The first bucket of a sync: each bucket gets the memory that it had in the previous sync.
        data = self._buffer(room, torch.device(handle["kind"]))
        self.fetch_into(data, handle, metas)
        if "at" in handle:
            offsets, _ = bucket_offsets(metas)
            return iter(slots(data, offsets, metas))
        sums = data[num_bytes:].view(torch.int64)[:num_groups].tolist()
        return checked(data, {**handle, "checksums": sums}, metas)

    def fetch_into(self, destination: Tensor, handle: Mapping[str, Any], metas: Metas) -> None:
        """Target side: reads a bucket into the target's own memory.

        Args:
            destination: uint8, for the bucket's bytes, and for the checksums after them if it is packed. Registered
                here, once.
            handle: the bucket's handle.
            metas: shape and dtype of its tensors.

        Raises:
            WeightSyncError: the source is gone, or sent nothing in time.
        """
        agent = self._borrowed()
        agent.register(destination)
        name, number = handle["agent"], handle["number"]
        try:
            if "introduction" in handle:
                agent.meet(name, handle["introduction"], self.timeout_s)
            if "at" not in handle:
                self._await_ready(agent, handle)
            if len(destination):
                here, there = _both(destination, handle, metas)
                kinds = memory_kind(destination.device), memory_kind(torch.device(handle["kind"]))
                agent.move("READ", (here, kinds[0]), (there, kinds[1]), name, self.timeout_s)
            self._say_taken(agent, handle, number + 1)
        except WeightSyncError as error:
            agent.give_up(name, [destination, self._word])
            raise WeightSyncError(f"{handle['num_bytes']} bytes could not be read by NIXL: {error}") from error

    def close(self) -> None:
        self._end_serving()
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            own = [kept.memory for kept in (self._slots, *self._abandoned) if kept is not None]
            for tensor in (*own, *self._staging, self._word):
                agent.forget(tensor)
            self._slots, self._abandoned = None, []
            self._staging = [torch.empty(0, dtype=torch.uint8)] * SLOTS
            self._word = torch.empty(0, dtype=torch.uint8)
        nixl_agent.give_back()

    def _borrowed(self) -> Agent:
        with self._lock:
            if self._agent is None:
                self._agent = nixl_agent.borrow()
            return self._agent

    def _end_serving(self) -> None:
        """Ends the previous export: it was taken, or its target gave up and may still write into the slots."""
        if self._serving is not None and not self._serving.end() and self._slots is not None:
            self._abandoned.append(self._slots)
            self._slots = None
        self._serving = None

    def _slots_of(self, agent: Agent, slot_bytes: int, device: torch.device, first: int) -> _Slots:
        """The previous slots, or larger ones, with the number of buckets already taken."""
        known = self._slots
        if known is not None and known.slot_bytes >= slot_bytes and (not slot_bytes or known.device == device):
            return known
        made = _Slots(slot_bytes, device)
        made.say(READY, first)
        made.say(TAKEN, first)
        agent.register(made.head)
        agent.register(made.memory)
        if known is not None:
            agent.forget(known.head)
            agent.forget(known.memory)
        self._slots = made
        return made

    def _buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """The staging buffer to use next."""
        self._turn = (self._turn + 1) % SLOTS
        known = self._staging[self._turn]
        if len(known) < num_bytes or known.device.type != device.type:
            if self._agent is not None:
                self._agent.forget(known)
            known = self._staging[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return known[:num_bytes]

    def _await_ready(self, agent: Agent, handle: Mapping[str, Any]) -> None:
        """Waits until the source has packed a bucket."""
        end = time.monotonic() + self.timeout_s
        while True:
            head = self._control(agent)
            here, there = (np.array([[at, HEAD_BYTES, 0]], np.uint64) for at in (head.data_ptr(), handle["head"]))
            left_s = max(0.0, end - time.monotonic())
            agent.move("READ", (here, "DRAM"), (there, "DRAM"), handle["agent"], left_s)
            words = head.view(torch.int64)
            if int(words[ERROR]):
                text = bytes(head[32 : 32 + int(words[ERROR])].tolist()).decode(errors="replace")
                raise WeightSyncError(f"the source could not pack them: {text}")
            if int(words[READY]) > handle["number"]:
                return
            if not left_s:
                raise WeightSyncError(f"the source did not have them ready in {self.timeout_s:g} s")
            time.sleep(LOOK_S)

    def _say_taken(self, agent: Agent, handle: Mapping[str, Any], count: int) -> None:
        head = self._control(agent)
        head.view(torch.int64)[TAKEN] = count
        place = 8 * TAKEN
        here, there = (np.array([[at + place, 8, 0]], np.uint64) for at in (head.data_ptr(), handle["head"]))
        agent.move("WRITE", (here, "DRAM"), (there, "DRAM"), handle["agent"], self.timeout_s)

    def _control(self, agent: Agent) -> Tensor:
        """This end's memory for the counters of both sides."""
        if not len(self._word):
            self._word = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
            agent.register(self._word)
        return self._word


class _Slots:
    """Registered memory of a source for one target."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = -(-slot_bytes // HEAD_BYTES) * HEAD_BYTES
        self.device = device
        self.head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        self.memory = torch.zeros(SLOTS * self.slot_bytes, dtype=torch.uint8, device=device)

    def slot(self, number: int) -> Tensor:
        start = number % SLOTS * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def where(self, number: int) -> dict[str, Any]:
        return {
            "slot": self.slot(number).data_ptr(),
            "kind": self.device.type,
            "index": max(self.memory.get_device(), 0),
        }

    def say(self, which: int, value: int) -> None:
        self.head.view(torch.int64)[which] = value

    @property
    def taken(self) -> int:
        return int(self.head.view(torch.int64)[TAKEN])

    def fail(self, why: str) -> None:
        text = why.encode()[: HEAD_BYTES - 32]
        self.head[32 : 32 + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self.say(ERROR, len(text))


@dataclass
class _Serving:
    """One running export: packs what must be packed, and keeps memory that is read in place until it was taken."""

    slots: _Slots
    first: int
    left: list[tuple[Outgoing, Sequence[WeightShard] | None]]
    timeout_s: float
    count: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.count = self.first + len(self.left)
        self.thread = threading.Thread(target=self._run, name="rlsdk-nixl", daemon=True)
        self.thread.start()

    def end(self) -> bool:
        """Ends the thread; False if a bucket was not taken."""
        self.cancelled.set()
        if self.thread is not None:
            self.thread.join()
        return self.slots.taken >= self.count

    def _run(self) -> None:
        with suppress(_NotTakenError):
            try:
                for number, (bucket, place) in enumerate(self.left, start=self.first):
                    if place is None:
                        self._wait(number - SLOTS + 1)
                        _pack(self.slots.slot(number), bucket)
                        self.slots.say(READY, number + 1)
                self._wait(self.count)
            except _NotTakenError:
                raise
            except Exception as error:
                self.slots.fail(f"{type(error).__name__}: {error}")
        self.left = []

    def _wait(self, count: int) -> None:
        """Waits until `count` buckets were taken."""
        seen, since = -1, time.monotonic()
        while (taken := self.slots.taken) < count:
            if taken != seen:
                seen, since = taken, time.monotonic()
            if self.cancelled.wait(LOOK_S) or time.monotonic() - since > self.timeout_s:
                raise _NotTakenError


class _NotTakenError(Exception):
    """The target has stopped taking buckets."""


def _pack(slot: Tensor, bucket: Outgoing) -> None:
    """Packs a bucket, followed by its checksums."""
    offsets, num_bytes = bucket_offsets(bucket.metas)
    num_groups = len(groups(offsets, num_bytes))
    sums = fill(slot[:num_bytes], offsets, bucket.take(), bucket.dtypes)
    room = slot[num_bytes : num_bytes + _trailer_bytes(num_groups)]
    room.view(torch.int64)[:num_groups] = torch.tensor(sums, dtype=torch.int64)
    if slot.is_cuda:
        torch.cuda.synchronize(slot.device)


def _in_place(bucket: Outgoing) -> Sequence[WeightShard] | None:
    """The shards of a bucket that the target can read in place; None: they must be packed."""
    if not bucket.is_here:
        return None
    shards = bucket.take()
    for shard, dtype in zip(shards, bucket.dtypes, strict=True):
        if shard.tensor.dtype is not getattr(torch, dtype) or _runs_of(shard.tensor) is None:
            return None
    return shards if len({shard.tensor.device for shard in shards}) <= 1 else None


def _runs_of(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """(address of the first, count, bytes of each, stride in bytes) of a tensor's contiguous runs of memory; None if
    they are irregular or short."""
    sizes: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if sizes and sizes[-1][1] == size * stride:
            sizes[-1] = sizes[-1][0] * size, stride
        else:
            sizes.append((size, stride))
    width = tensor.element_size()
    if tensor.is_contiguous():
        return tensor.data_ptr(), 1, tensor.nbytes, tensor.nbytes
    if len(sizes) == 2 and sizes[1][1] == 1 and sizes[0][1] > 0 and sizes[1][0] * width >= MIN_RUN_BYTES:
        return tensor.data_ptr(), sizes[0][0], sizes[1][0] * width, sizes[0][1] * width
    return None


def _where(shards: Sequence[WeightShard]) -> dict[str, Any]:
    device = shards[0].tensor.device if shards else torch.device("cpu")
    return {"kind": device.type, "index": device.index or 0}


def _both(destination: Tensor, handle: Mapping[str, Any], metas: Metas) -> tuple[Runs, Runs]:
    """Runs of the destination, and the matching runs of the source."""
    start, index = destination.data_ptr(), max(destination.get_device(), 0)
    if "at" not in handle:
        size = len(destination)
        return np.array([[start, size, index]], np.uint64), np.array(
            [[handle["slot"], size, handle["index"]]], np.uint64
        )
    offsets, _ = bucket_offsets(metas)
    here, there = [], []
    for offset, (address, count, run, step) in zip(offsets, handle["at"], strict=True):
        if run:
            rows = np.arange(count, dtype=np.uint64)
            fixed = np.full(count, run, np.uint64)
            here.append(np.stack([start + offset + rows * run, fixed, np.full(count, index, np.uint64)], axis=1))
            place = np.full(count, handle["index"], np.uint64)
            there.append(np.stack([np.uint64(address) + rows * np.uint64(step), fixed, place], axis=1))
    return np.concatenate(here), np.concatenate(there)


def _slot_bytes(bucket: Outgoing) -> int:
    offsets, num_bytes = bucket_offsets(bucket.metas)
    return num_bytes + _trailer_bytes(len(groups(offsets, num_bytes)))


def _trailer_bytes(num_groups: int) -> int:
    return -(-8 * num_groups // ALIGNMENT) * ALIGNMENT


def _device_of(buckets: Sequence[Outgoing]) -> torch.device:
    return next((bucket.device for bucket in buckets if bucket.device is not None), torch.device("cpu"))
