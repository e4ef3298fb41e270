"""The target's end of the transports: requests buckets from a source, and receives them one after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlsdk.interfaces import Bucket, Peer, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding.transports.in_process import InProcessTransport
from rlsdk.sharding.transports.object_store import ObjectStoreTransport
from rlsdk.sharding.transports.ring import PipeGoneError
from rlsdk.sharding.transports.ring_transport import DeviceRingTransport, RingTransport
from rlsdk.sharding.transports.table import make_transport, named_transports
from rlsdk.sharding.transports.transport import Transport, use_device

EXPORT_METHOD = "export_weights"
"""Method of a train engine's host: `export_weights(buckets, sync) -> handles`, served while its engine is busy."""
PASS_ON_METHOD = "pass_on_weights"
"""Method of a rollout engine's host: `pass_on_weights(buckets, sync, timeout_s) -> handles`."""
NEXT_BEST = {
    DeviceRingTransport.name: RingTransport.name,
    RingTransport.name: ObjectStoreTransport.name,
}
"""Transport to try if memory cannot be opened from this process."""
_log = logging.getLogger(__name__)


class OpenTransports:
    """The transports of one target, by route, until a pull fails. Threads of an aborted pull may outlive it: they find
    these transports closed, and leave nothing attached for which a source would wait."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: of this process, in its own numbering; None: the host."""
        self.device = device
        self._open: dict[tuple[str, int, int], Transport] = {}
        self._closed = False
        self._lock = threading.Lock()

    def find(self, bucket: Bucket) -> Transport | None:
        """The transport of a bucket's route; None if it does not exist yet."""
        return self._open.get(_route(bucket))

    def fetch(self, bucket: Bucket, handle: Mapping[str, Any], timeout_s: float) -> Iterator[WeightShard]:
        """Yields the shards of one bucket.

        Args:
            bucket: the requested bucket.
            handle: the source's answer.
            timeout_s: longest wait for any part of it.

        Raises:
            WeightSyncError: the bytes are gone or damaged, or these transports are closed.
        """
        transport = self.find(bucket) or self._add(bucket)
        transport.timeout_s = timeout_s
        with use_device(self.device):  # a new thread starts with device 0
            tensors = transport.fetch(handle, [(t.box.size, t.dtype) for t in bucket.transfers])
        if self._closed:
            transport.close()
            raise WeightSyncError("this pull was broken off")
        return (
            WeightShard(name=transfer.name, box=transfer.box, tensor=tensor)
            for transfer, tensor in zip(bucket.transfers, tensors, strict=True)
        )

    def close(self) -> None:
        """Unmaps their memory; they cannot be used afterwards."""
        with self._lock:
            self._closed = True
            held, self._open = list(self._open.values()), {}
        for transport in held:
            transport.close()

    def _add(self, bucket: Bucket) -> Transport:
        made = make_transport(bucket.transport)
        made.device = self.device
        with self._lock:
            if self._closed:
                raise WeightSyncError("this pull was broken off")
            return self._open.setdefault(_route(bucket), made)


def _route(bucket: Bucket) -> tuple[str, int, int]:
    return bucket.transport, bucket.source, bucket.target


@dataclass(eq=False)
class Feed:
    """The buckets that one source sends to one target in one pull, in order. Each call of the source requests as many
    buckets as the transport's `call_bytes` allows."""

    left: deque[Bucket]
    peer: Peer | None
    """The source; None: all handles are already here."""
    transports: OpenTransports
    instead: dict[tuple[str, int], str]
    """(transport, source) -> the transport that replaces it, because it did not work. Kept between pulls."""
    timeout_s: float
    """Longest wait for one answer or for one part of the data, not for everything."""
    handles: deque[Mapping[str, Any]] = field(default_factory=deque)
    method: str = EXPORT_METHOD
    """Method of the peer's host to call."""
    sync: str = ""
    """Unique name of the sync. Empty: not known."""
    in_place: bool = False
    """Read the weights of the peer, which is in this process, in place, by whatever transport they were planned."""
    anew: bool = False
    """Ask for a ring that no other process has attached to."""

    @property
    def is_local(self) -> bool:
        """Whether the shards are views within this process, which are created on demand and without a thread."""
        return bool(self.left) and self._chosen(self.left[0]).transport == InProcessTransport.name

    def next(self) -> Iterator[WeightShard]:
        """The shards of the next bucket, once its source has them ready. Falls back to the next best transport if the
        bucket's transport cannot be attached.

        Raises:
            WeightSyncError: the bytes are gone or damaged, or the pull was aborted.
            DeadlineError: the source does not answer in time.
        """
        while True:
            bucket = self._chosen(self.left[0])
            try:
                if not self.handles:
                    self.handles.extend(self.ask())
                shards = self.transports.fetch(bucket, self.handles[0], self.timeout_s)
            except PipeGoneError:
                if self.anew or self.peer is None:
                    raise
                self.anew = True  # Another process had the same number in another plan.
                self.handles.clear()
                continue
            except AttachError as error:
                self._take_another_way(bucket, error)
                continue
            self.left.popleft()
            self.handles.popleft()
            return shards

    def _chosen(self, bucket: Bucket) -> Bucket:
        name = self.instead.get((bucket.transport, bucket.source), bucket.transport)
        if self.in_place:
            name = InProcessTransport.name
        readers = (bucket.target,) if self.anew else bucket.readers
        unchanged = name == bucket.transport and readers == bucket.readers
        return bucket if unchanged else replace(bucket, transport=name, readers=readers)

    def ask(self) -> Sequence[Mapping[str, Any]]:
        """Handles of the next buckets: directly if the source is in this process, otherwise by one call."""
        name = self._chosen(self.left[0]).transport
        if self.peer is None:
            raise WeightSyncError("the source handed out fewer buckets than were asked for")
        if name == InProcessTransport.name:
            host = self.peer.local()
            if host is None:
                raise WeightSyncError(
                    f"source rank {self.left[0].source} is not in this process: the plan is for other layouts"
                )
            handles: Sequence[Mapping[str, Any]] = getattr(host, EXPORT_METHOD)([self.left[0]])
            return handles
        buckets = [self._chosen(bucket) for bucket in window(self.left, named_transports([name])[0].most_bytes())]
        which = (self.sync,) if self.method == EXPORT_METHOD else (self.sync, self.timeout_s)
        handles = self.peer.call(self.method, buckets, *which, timeout_s=self.timeout_s)
        if len(handles) != len(buckets):
            raise WeightSyncError(f"{len(buckets)} buckets were asked for, and the source answered {len(handles)}")
        return handles

    def _take_another_way(self, bucket: Bucket, error: AttachError) -> None:
        # Memory that was mapped before but is gone now does not justify another transport, least of all in mid-sync.
        if self.peer is None or bucket.transport not in NEXT_BEST or _in_place(self.transports.find(bucket)):
            raise error
        chosen = self.instead[self.left[0].transport, bucket.source] = NEXT_BEST[bucket.transport]
        self.handles.clear()
        _log.warning(
            "weights of source rank %d cannot come by %s (%s); from now on by %s",
            bucket.source, bucket.transport, error, chosen,
        )  # fmt: skip


def _in_place(transport: Transport | None) -> bool:
    return isinstance(transport, RingTransport) and transport.in_place


def window(buckets: Sequence[Bucket], call_bytes: int | None) -> list[Bucket]:
    """The first buckets to request in one call: at least one, and all with the same transport."""
    found: list[Bucket] = []
    total = 0
    for bucket in buckets:
        total += bucket.num_bytes
        fits = call_bytes is None or total <= call_bytes
        if found and not (fits and bucket.transport == found[0].transport):
            break
        found.append(bucket)
    return found
