"""What a replica's own process does in a sync whose weights its workers take: asks the sources, and hands the answers
on. Bytes pass through it only where a source cannot reach a worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rlsdk.interfaces import Bucket, Delivery, RolloutEngine, SyncReceipt, WeightSyncError
from rlsdk.kit.shared_memory import AttachError
from rlsdk.sharding.forwarding import Forwarder, merged_rounds, teed
from rlsdk.sharding.gathering import Gathering, MakeFeed, feeds_of
from rlsdk.sharding.receiving import RECEIVER, parcel
from rlsdk.sharding.signs import Signs
from rlsdk.sharding.transports import InProcessTransport, SharedMemoryTransport, named_transports

_log = logging.getLogger(__name__)
HOST = -1
"""Stands for this process where others stand by their index into the source layouts."""


class WorkerPull:
    """One per replica. Keeps what it passes bytes on through from sync to sync."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._ways: dict[int, SharedMemoryTransport] = {}
        self._signs: Signs | None = None
        self._all_by_host = False
        """Workers could not open the memory of their sources."""

    def pull(
        self,
        workers: Sequence[str],
        buckets: Sequence[Bucket],
        feed: MakeFeed,
        order: Mapping[str, int],
        version: int,
        timeout_s: float,
    ) -> SyncReceipt:
        """Has every worker take its buckets.

        Args:
            workers: of each place, in the order of `RolloutEngine.layout`.
            buckets: of all of them, by place.
            feed: makes the feed of one source's buckets for one place.
            order: position of each tensor: the order in which the plan brings them.
            version: what the engine serves afterwards.
            timeout_s: longest wait without progress.

        Raises:
            WeightSyncError: a bucket did not come, or a worker received other bytes than it holds.
        """
        while True:
            try:
                return self._pull(workers, buckets, feed, order, version, timeout_s)
            except AttachError as error:
                if self._all_by_host:
                    raise
                self._all_by_host = True
                _log.warning("weights cannot come to workers directly (%s); from now on through their host", error)

    def _pull(
        self,
        workers: Sequence[str],
        buckets: Sequence[Bucket],
        feed: MakeFeed,
        order: Mapping[str, int],
        version: int,
        timeout_s: float,
    ) -> SyncReceipt:
        targets = sorted({bucket.target for bucket in buckets})
        if len(targets) != len(workers):
            raise WeightSyncError(
                f"the plan brings weights to {len(targets)} places of this replica, whose engine has {len(workers)} "
                "workers: it was made for other layouts"
            )
        signs = self._signs_of(len(workers))
        wanted: dict[str, int] = {}
        deliveries: list[Delivery] = []
        with ExitStack() as passing:
            for target, worker in zip(targets, workers, strict=True):
                mine = [bucket for bucket in buckets if bucket.target == target]
                wanted[worker] = sum(bucket.num_bytes for bucket in mine)
                if self._all_by_host or not all(map(_reaches_workers, mine)):
                    mine, handles = self._pass_on(target, mine, feed, order, version, timeout_s, passing)
                else:
                    handles = {source: asked.ask() for (_, source), asked in feeds_of(mine, feed).items()}
                content = parcel(mine, handles, order, version, timeout_s, signs.of(len(deliveries)))
                deliveries.append(Delivery(worker=worker, receiver=RECEIVER, parcel=content))
            passing.enter_context(signs.watched())
            receipt = self._engine.receive_weights(deliveries, version)
        received = {part.worker: part.num_bytes for part in receipt.workers}
        if received != wanted:
            raise WeightSyncError(
                f"version {version}: workers received {received} bytes, and should have received {wanted}"
            )
        return receipt

    def close(self) -> None:
        """Frees the memory that bytes are passed on through."""
        ways, self._ways = self._ways, {}
        for way in ways.values():
            way.close()
        if self._signs is not None:
            self._signs.close()
            self._signs = None

    def _signs_of(self, count: int) -> Signs:
        if self._signs is None or self._signs.count != count:
            self._signs = Signs(count)
        return self._signs

    def _pass_on(
        self,
        target: int,
        buckets: Sequence[Bucket],
        feed: MakeFeed,
        order: Mapping[str, int],
        version: int,
        timeout_s: float,
        passing: ExitStack,
    ) -> tuple[list[Bucket], Mapping[int, Sequence[Mapping[str, Any]]]]:
        """Gathers one worker's buckets here, on a thread, and sends them to it through shared memory. Returns the
        buckets as the worker sees them, all from this process, and their handles."""
        rounds = merged_rounds(buckets, order)
        forwarder = Forwarder(rounds, timeout_s)
        way = self._ways.setdefault(target, SharedMemoryTransport())
        way.timeout_s = timeout_s
        handles = way.export(forwarder.outgoing)
        gathering = Gathering(buckets, order, feed, version)
        thread = threading.Thread(target=_drain, args=(gathering, forwarder), name="rlsdk-pass-on", daemon=True)
        thread.start()
        passing.callback(forwarder.fail)
        seen = [
            Bucket(
                source=HOST,
                target=target,
                transport=SharedMemoryTransport.name,
                transfers=tuple(transfers),
                num_bytes=sum(transfer.num_bytes for transfer in transfers),
                round=number,
            )
            for number, transfers in enumerate(rounds)
        ]
        return seen, {HOST: handles}


def _drain(gathering: Gathering, forwarder: Forwarder) -> None:
    try:
        for _ in teed(gathering.rounds(), [forwarder]):
            pass
    except Exception as error:
        forwarder.fail(str(error))


def _reaches_workers(bucket: Bucket) -> bool:
    """Whether a worker, which can call nobody, takes all that one answer of the source describes."""
    (kind,) = named_transports([bucket.transport])
    return kind.call_bytes is None and kind is not InProcessTransport
