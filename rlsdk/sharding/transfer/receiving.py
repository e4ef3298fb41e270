"""Receives a sync in a worker of a rollout engine: a process that is not a rank of the run and cannot call others.

The replica's own process requests the buckets, once for each pair of source and worker, and forwards the answers: plain
values that describe where the bytes are. The bytes go directly from the source to the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsdk.interfaces import Box, Bucket, Transfer, WeightShard, WeightSyncError
from rlsdk.sharding.transfer.devices import current_device
from rlsdk.sharding.transfer.fetching import Feed, OpenTransports
from rlsdk.sharding.transfer.forwarding import teed
from rlsdk.sharding.transfer.gathering import Gathering
from rlsdk.sharding.transfer.worker_progress import counted

RECEIVER = "rlsdk.sharding.transfer.receiving:receive"
"""`Delivery.receiver`."""
_open = OpenTransports()
"""Transports of this process, kept between syncs."""


def parcel(
    buckets: Sequence[Bucket],
    handles: Mapping[int, Sequence[Mapping[str, Any]]],
    order: Mapping[str, int],
    version: int,
    timeout_s: float,
    sign: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The information that a worker needs to receive its buckets, as plain values.

    Args:
        buckets: all buckets of one worker, in the plan's order.
        handles: by source, the handles of its buckets.
        order: position of each tensor in the plan's order.
        version: version for messages.
        timeout_s: longest wait without progress.
        sign: where the worker reports progress (`WorkerProgress.of`).
    """
    names = sorted({transfer.name for bucket in buckets for transfer in bucket.transfers}, key=order.__getitem__)
    number = {name: at for at, name in enumerate(names)}
    return {
        "names": names,
        "buckets": [
            [b.source, b.target, b.transport, b.num_bytes, b.round, [_packed(t, number[t.name]) for t in b.transfers]]
            for b in buckets
        ],
        "handles": [[source, [dict(handle) for handle in mine]] for source, mine in handles.items()],
        "version": version,
        "timeout_s": timeout_s,
        "sign": sign,
    }


def receive(parcel: Mapping[str, Any]) -> Iterator[WeightShard]:
    """Yields every shard of a worker; each is valid until the next is requested.

    Raises:
        WeightSyncError: the bytes are gone or damaged, or cannot be reached from this process.
    """
    global _open
    names: Sequence[str] = parcel["names"]
    handles = {source: deque(mine) for source, mine in parcel["handles"]}
    buckets = [_unpacked(values, names) for values in parcel["buckets"]]

    def feed(mine: deque[Bucket]) -> Feed:
        return Feed(mine, None, _open, {}, parcel["timeout_s"], handles[mine[0].source])

    gathering = Gathering(buckets, {name: at for at, name in enumerate(names)}, feed, parcel["version"])
    _open.device = current_device()
    try:
        yield from counted(teed(gathering.rounds(), ()), parcel["sign"])
    except BaseException:
        # Sources still offer buckets that nobody will take: closing the transports notifies them.
        held, _open = _open, OpenTransports()
        held.close()
        raise
    if gathering.taken < gathering.wanted:
        raise WeightSyncError(f"{gathering.taken} of {gathering.wanted} pieces came")


def _packed(transfer: Transfer, number: int) -> list[Any]:
    return [number, transfer.box.offset, transfer.box.size, transfer.dtype, transfer.num_bytes]


def _unpacked(values: Sequence[Any], names: Sequence[str]) -> Bucket:
    source, target, transport, num_bytes, number, transfers = values
    return Bucket(
        source=source,
        target=target,
        transport=transport,
        transfers=tuple(
            Transfer(name=names[at], box=Box(tuple(offset), tuple(size)), dtype=dtype, num_bytes=count)
            for at, offset, size, dtype, count in transfers
        ),
        num_bytes=num_bytes,
        round=number,
    )
