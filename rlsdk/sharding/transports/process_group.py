"""Point-to-point transfers by torch.distributed, for ranks without shared memory, where the fabric's own library is
fastest."""

from __future__ import annotations

import os
import socket
import struct
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import WeightLayout, WeightSyncError
from rlsdk.sharding.transports.transport import Outgoing, Transport, use_device
from rlsdk.sharding.transports.wire import (
    ALIGNMENT,
    Metas,
    announcement,
    bucket_offsets,
    check_announcement,
    checked,
    fill,
    groups,
)

CONNECT_S = 5.0
"""Timeout, in seconds, for trying one of several addresses."""
LEFT_S = 1.0
"""Seconds in which what the sync before sent is done with, if its target has taken all of it."""
_SIOCGIFADDR = 0x8915
_AS_TARGET, _AS_SOURCE = threading.Lock(), threading.Lock()
"""Locks of this process: a worker may be a source and a target at the same time."""


class _Pair:
    """One end of a group of two, and its staging memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.group: Any = None
        self.store: Any = None
        self._staging = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """The staging buffer to use next."""
        self._turn = 1 - self._turn
        if len(self._staging[self._turn]) < num_bytes or self._staging[self._turn].device != device:
            self._staging[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._staging[self._turn][:num_bytes]


class ProcessGroupTransport(Transport):
    """Two processes, with a process group of these two, never the default one: gloo between CPUs, NCCL between GPUs of
    two nodes, with the same calls. The source starts to send while its handles are still on the way, and sends one
    bucket while it fills the next; the checksums of a bucket follow its bytes.

    Between CPUs it is used only if it is named explicitly, because the target must be able to connect to the source's
    host. A process that dies closes its sockets, which are its only resources; the other end gets an error immediately
    or at the deadline.

    It uses pairs instead of one communicator for all: operations of a communicator run in the order in which they were
    started, and two sources that serve two targets in different orders would deadlock. Pairs must be opened in order,
    because NCCL may wait for a whole device when it creates a communicator: a target opens one pair after the other,
    and a source opens one only with a target that waits for this source alone, so no cycle of waits can occur.
    """

    name = "process_group"
    stays_on_device = True
    call_bytes = None

    def __init__(self) -> None:
        self._pair: _Pair | None = None
        """On a target's end: that of the source whose group it has joined."""
        self._sending: threading.Thread | None = None

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        on_cpus = source.device == "cpu" == target.device
        # NCCL refuses two ranks on one device, and may hang where a device has several communicators at once: within a
        # node the device ring is for GPUs.
        apart = on_cpus or (source.node != target.node and "cpu" not in (source.device, target.device))
        return source.process != target.process and dist.is_available() and apart

    def start_sync(self) -> None:
        """A target that never took what it asked for would get it now: it and the next ones join another group."""
        if self._sending is not None:
            self._sending.join(LEFT_S)
            if self._sending.is_alive():
                self._pair = self._sending = None

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        if self._pair is None:
            self._pair = _Pair(uuid.uuid4().hex)
            self._pair.store = dist.TCPStore(  # type: ignore[attr-defined]
                "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
            )
        device = _device_of(buckets)
        thread = threading.Thread(
            target=self._send, args=(self._pair, buckets, device, self._sending), daemon=True, name="rlsdk-send"
        )
        self._sending = thread
        thread.start()
        pair = self._pair
        way = {"hosts": addresses(), "port": pair.store.port, "group": pair.name, "device": device.type}
        return [{**way, **announcement(bucket_offsets(bucket.metas)[1])} for bucket in buckets]

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        num_bytes = check_announcement(handle, metas)
        num_groups = len(groups(*bucket_offsets(metas)))
        device = self._own_device(handle["device"])
        if self._pair is None or handle["group"] != self._pair.name:
            self._pair = _Pair(handle["group"])  # Another source, or a new group of the same one.
        pair = self._pair
        data = pair.buffer(num_bytes + _trailer_bytes(num_groups), device)
        try:
            if pair.group is None:
                with _one_at_a_time(_AS_TARGET, self.timeout_s):
                    self._open(pair, handle, device)
            if len(data):
                pair.group.recv([data], 0, 0).wait(timedelta(seconds=self.timeout_s))
        except (RuntimeError, dist.DistError) as error:
            raise WeightSyncError(
                f"the source at {handle['hosts'][0]}:{handle['port']} did not send {num_bytes} bytes in "
                f"{self.timeout_s:g} s: {error}"
            ) from error
        sums = data[num_bytes:].view(torch.int64)[:num_groups].tolist()
        return checked(data, {**handle, "checksums": sums}, metas)

    def close(self) -> None:
        self._pair = self._sending = None

    def _send(
        self, pair: _Pair, buckets: Sequence[Outgoing], device: torch.device, before: threading.Thread | None
    ) -> None:
        """On a thread: connects to the target the first time, then sends after earlier transfers. Errors are reported
        by the target, which does not get its bytes."""
        if before is not None:
            before.join()
        with use_device(device):
            self._send_all(pair, buckets, device)

    def _send_all(self, pair: _Pair, buckets: Sequence[Outgoing], device: torch.device) -> None:
        limit, leaving = timedelta(seconds=self.timeout_s), None
        try:
            if pair.group is None:
                # Before waiting for shards: forwarded weights may have to arrive in this process by the same transport.
                # The target records by which of this host's addresses it connected.
                host = pair.store.get(f"{pair.name}/host").decode()
                with _one_at_a_time(_AS_SOURCE, self.timeout_s):
                    pair.group = self._meet(pair, 0, device, host)
            for bucket in buckets:
                data = _fill(pair, bucket, device)
                if leaving is not None:
                    leaving.wait(limit)
                leaving = pair.group.send([data], 1, 0) if len(data) else None
            if leaving is not None:
                leaving.wait(limit)
        except Exception:
            pair.group = None  # Closes the connection: the target notices immediately.

    def _own_device(self, kind: str) -> torch.device:
        """This end's device of a kind: a bare "cuda" would be device 0, also in a process that serves another."""
        if self.device is not None and self.device.type == kind:
            return self.device
        return torch.device(kind) if kind != "cuda" else torch.device(kind, torch.cuda.current_device())

    def _open(self, pair: _Pair, handle: Mapping[str, Any], device: torch.device) -> None:
        """Joins the group on the target's end."""
        host, own = _reach(handle["hosts"], handle["port"], self.timeout_s)
        pair.store = dist.TCPStore(  # type: ignore[attr-defined]
            host, handle["port"], is_master=False, timeout=timedelta(seconds=self.timeout_s)
        )
        pair.store.set(f"{pair.name}/host", host)
        pair.group = self._meet(pair, 1, device, own)

    def _meet(self, pair: _Pair, rank: int, device: torch.device, host: str) -> Any:
        limit = timedelta(seconds=self.timeout_s)
        store = dist.PrefixStore(pair.name, pair.store)  # type: ignore[attr-defined]
        if device.type == "cpu":
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = limit
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            return dist.ProcessGroupGloo(store, rank, 2, gloo)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        # NCCL creates its communicator with the first byte: here, while no other one is created.
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        (group.send([byte], 1, 0) if rank == 0 else group.recv([byte], 0, 0)).wait(limit)
        return group


def _fill(pair: _Pair, bucket: Outgoing, device: torch.device) -> Tensor:
    """A bucket in staging memory, with its checksums after it."""
    offsets, num_bytes = bucket_offsets(bucket.metas)
    num_groups = len(groups(offsets, num_bytes))
    data = pair.buffer(num_bytes + _trailer_bytes(num_groups), device)
    sums = fill(data[:num_bytes], offsets, bucket.take(), bucket.dtypes)
    data[num_bytes:].view(torch.int64)[:num_groups] = torch.tensor(sums, dtype=torch.int64)
    return data


def _trailer_bytes(num_groups: int) -> int:
    """Bytes of the checksums after a bucket's bytes."""
    return -(-8 * num_groups // ALIGNMENT) * ALIGNMENT


def _device_of(buckets: Sequence[Outgoing]) -> torch.device:
    """Device of the buckets: all shards of a rank are on one device."""
    return next((bucket.device for bucket in buckets if bucket.device is not None), torch.device("cpu"))


@contextmanager
def _one_at_a_time(lock: threading.Lock, timeout_s: float) -> Iterator[None]:
    """Holds the lock; raises `RuntimeError` if its holder takes too long."""
    if not lock.acquire(timeout=timeout_s):
        raise RuntimeError(f"another process group of this process was not opened within {timeout_s:g} s")
    try:
        yield
    finally:
        lock.release()


def addresses() -> list[str]:
    """IPv4 addresses of this host, the one of the default route first and loopback last. The host's own name is not
    used, as it often resolves to loopback. If GLOO_SOCKET_IFNAME names an interface, its address comes first."""
    import fcntl

    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError, KeyError):
            chosen = struct.pack("256s", os.environ["GLOO_SOCKET_IFNAME"].encode()[:15])
            found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, chosen)[20:24]))
        with suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # Reserved for documentation; nothing is sent.
            found.append(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(dict.fromkeys([*found, "127.0.0.1"]), key=lambda address: address.startswith("127."))


def _reach(hosts: Sequence[str], port: int, timeout_s: float) -> tuple[str, str]:
    """The first of the source's addresses that can be reached from here, and this host's own on the way there.

    Raises:
        WeightSyncError: no address can be reached.
    """
    tried = []
    for host in hosts:
        try:
            with socket.create_connection((host, port), min(timeout_s, CONNECT_S)) as connection:
                return host, connection.getsockname()[0]
        except OSError as error:
            tried.append(f"{host}:{port}: {error}")
    raise WeightSyncError(f"no address of the source can be reached from here ({'; '.join(tried)})")
