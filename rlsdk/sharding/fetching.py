"""The target's end of the transports: asks a source for a bucket, and takes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlsdk.interfaces import Bucket, DeadlineError, Peer, WeightShard, WeightSyncError
from rlsdk.sharding.transport import Transport
from rlsdk.sharding.transports import InProcessTransport, make_transport

EXPORT_METHOD = "export_weights"
"""Of the host of a train engine: `export_weights(bucket) -> handle`, served while its engine thread is busy."""


class OpenTransports:
    """The transports of one target, by route, until a pull fails. Threads of a pull that was broken off may outlive it:
    they find these closed, and leave nothing attached that a source would wait for."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], Transport] = {}
        self._closed = False
        self._lock = threading.Lock()

    def find(self, bucket: Bucket) -> Transport | None:
        """The transport of a bucket's route, where one was made."""
        return self._open.get(_route(bucket))

    def fetch(self, bucket: Bucket, peer: Peer, deadline: float) -> Iterator[WeightShard]:
        """One bucket's shards, once its source has them ready.

        Raises:
            WeightSyncError: the bytes are gone or damaged, or these transports are closed.
            DeadlineError: the time for the sync is over.
        """
        transport = self.find(bucket) or self._add(bucket)
        handle = _export(bucket, peer, deadline)
        transport.timeout_s = max(0.0, deadline - time.monotonic())
        tensors = transport.fetch(handle, [(t.box.size, t.dtype) for t in bucket.transfers])
        if self._closed:
            transport.close()
            raise WeightSyncError("this pull was broken off")
        return (
            WeightShard(name=transfer.name, box=transfer.box, tensor=tensor)
            for transfer, tensor in zip(bucket.transfers, tensors, strict=True)
        )

    def close(self) -> None:
        """Lets go of the memory that they map, for good."""
        with self._lock:
            self._closed = True
            held, self._open = list(self._open.values()), {}
        for transport in held:
            transport.close()

    def _add(self, bucket: Bucket) -> Transport:
        made = make_transport(bucket.transport)
        with self._lock:
            if self._closed:
                raise WeightSyncError("this pull was broken off")
            return self._open.setdefault(_route(bucket), made)


def _route(bucket: Bucket) -> tuple[str, int, int]:
    return bucket.transport, bucket.source, bucket.target


def _export(bucket: Bucket, peer: Peer, deadline: float) -> Mapping[str, Any]:
    """Asks the source for a bucket: directly when it lives in this process, else by a call."""
    if bucket.transport == InProcessTransport.name:
        host = peer.local()
        if host is None:
            raise WeightSyncError(f"source rank {bucket.source} is not in this process: the plan is for other layouts")
        handle: Mapping[str, Any] = getattr(host, EXPORT_METHOD)(bucket)
        return handle
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("the time for the sync is over")
    handle = peer.call(EXPORT_METHOD, bucket, timeout_s=left)
    return handle
