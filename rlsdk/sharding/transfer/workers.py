"""The replica's process in a sync whose weights its workers receive: it calls the sources and forwards the answers.
Bytes pass through it only if a source cannot reach a worker."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

from rlsdk.interfaces import Bucket, Delivery, SyncReceipt, WeightLayout, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding.transfer.fetching import Feed
from rlsdk.sharding.transfer.forwarding import Forwarder, merged_rounds, teed
from rlsdk.sharding.transfer.gathering import Gathering, MakeFeed, feeds_of
from rlsdk.sharding.transfer.receiving import RECEIVER, parcel
from rlsdk.sharding.transfer.worker_progress import WorkerProgress
from rlsdk.sharding.transports.process_group import ProcessGroupTransport
from rlsdk.sharding.transports.ring_transport import DeviceRingTransport, RingTransport
from rlsdk.sharding.transports.table import named_transports
from rlsdk.sharding.transports.transport import Transport

_log = logging.getLogger(__name__)
HOST = -1
"""Key of this process among keys that are indices of source layouts."""


class Receives(Protocol):
    """The part of a `RolloutEngine` whose workers receive weights themselves."""

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt: ...


class WorkerPull:
    """One per replica. Keeps its forwarding resources between syncs."""

    def __init__(self, engine: Receives) -> None:
        self._engine = engine
        self._ways: dict[int, Transport] = {}
        self._signs: WorkerProgress | None = None
        self._through_host_memory = False
        """Whether workers could not open device memory of their sources."""
        self._all_by_host = False
        """Whether workers could not open any memory of their sources."""

    def pull(
        self,
        workers: Sequence[WeightLayout],
        buckets: Sequence[Bucket],
        feed: MakeFeed,
        order: Mapping[str, int],
        version: int,
        timeout_s: float,
        passed: Mapping[int, Sequence[Forwarder]] | None = None,
    ) -> SyncReceipt:
        """Lets every worker receive its buckets.

        Args:
            workers: the layout of each place, in the order of `RolloutEngine.layout`.
            buckets: buckets of all workers, by place.
            feed: creates the feed of one source's buckets for one place.
            order: position of each tensor in the plan's order.
            version: the version that the engine serves afterwards.
            timeout_s: longest wait without progress.
            passed: forwarders of each place that is in a chain of replicas. Their weights go through this process.

        Raises:
            WeightSyncError: a bucket did not arrive, or a worker received other bytes than it holds.
        """
        anew = False
        while True:
            try:
                return self._pull(
                    workers, buckets, _anew(feed) if anew else feed, order, version, timeout_s, passed or {}
                )
            except AttachError as error:
                if not (anew or passed):
                    anew = True  # Another process may have had the same number in another plan.
                    continue
                # Forwarded weights cannot be received twice.
                way = None if passed else self._take_another_way(buckets)
                if way is None:
                    raise
                _log.warning("weights cannot come to workers directly (%s); from now on through %s", error, way)

    def _take_another_way(self, buckets: Sequence[Bucket]) -> str | None:
        """Chooses what to try if workers cannot open memory, and names it; None: nothing is left."""
        if not self._through_host_memory and any(b.transport == DeviceRingTransport.name for b in buckets):
            self._through_host_memory = True
            return "host memory"
        if not self._all_by_host:
            self._all_by_host = True
            return "their host"
        return None

    def _chosen(self, bucket: Bucket) -> Bucket:
        by_host_memory = self._through_host_memory and bucket.transport == DeviceRingTransport.name
        return replace(bucket, transport=RingTransport.name) if by_host_memory else bucket

    def _pull(
        self,
        workers: Sequence[WeightLayout],
        buckets: Sequence[Bucket],
        feed: MakeFeed,
        order: Mapping[str, int],
        version: int,
        timeout_s: float,
        passed: Mapping[int, Sequence[Forwarder]],
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
        threads: list[threading.Thread] = []
        with ExitStack() as passing:
            for target, place in zip(targets, workers, strict=True):
                worker = str(place.worker)
                mine = [self._chosen(bucket) for bucket in buckets if bucket.target == target]
                wanted[worker] = sum(bucket.num_bytes for bucket in mine)
                if target in passed or self._all_by_host or not all(_reaches_workers(b) for b in mine):
                    gathering = Gathering(mine, order, _in_place_if_here(feed), version)
                    way, onward = self._way(target, place), passed.get(target, ())
                    mine, handles, thread = self._pass_on(way, mine, gathering, order, timeout_s, passing, onward)
                    threads.append(thread)
                else:
                    handles = {source: asked.ask() for (_, source), asked in feeds_of(mine, feed).items()}
                sign = signs.of(len(deliveries), is_apart=place.is_apart)
                content = parcel(mine, handles, order, version, timeout_s, sign)
                deliveries.append(Delivery(worker=worker, receiver=RECEIVER, parcel=content))
            passing.enter_context(signs.watched())
            receipt = self._engine.receive_weights(deliveries, version)
            for thread in threads:  # Forwarding to other replicas may finish later than the local transfer.
                thread.join()
        received = {part.worker: part.num_bytes for part in receipt.workers}
        if received != wanted:
            raise WeightSyncError(
                f"version {version}: workers received {received} bytes, and should have received {wanted}"
            )
        return receipt

    def close(self) -> None:
        """Frees the memory for forwarding."""
        ways, self._ways = self._ways, {}
        for way in ways.values():
            way.close()
        if self._signs is not None:
            self._signs.close()
            self._signs = None

    def _signs_of(self, count: int) -> WorkerProgress:
        if self._signs is None or self._signs.count != count:
            self._signs = WorkerProgress(count)
        return self._signs

    def _way(self, target: int, worker: WeightLayout) -> Transport:
        """The transport from this process to one of its workers."""
        if target not in self._ways:
            self._ways[target] = ProcessGroupTransport() if worker.is_apart else RingTransport()
        return self._ways[target]

    def _pass_on(
        self,
        way: Transport,
        buckets: Sequence[Bucket],
        gathering: Gathering,
        order: Mapping[str, int],
        timeout_s: float,
        passing: ExitStack,
        onward: Sequence[Forwarder],
    ) -> tuple[list[Bucket], Mapping[int, Sequence[Mapping[str, Any]]], threading.Thread]:
        """Receives one worker's buckets here, on a thread, and sends them to the worker and to other replicas.
        Returns the buckets as the worker sees them, all from this process, their handles, and the thread."""
        rounds = merged_rounds(buckets, order)
        forwarder = Forwarder(rounds, timeout_s)
        way.timeout_s = timeout_s
        way.start_sync()
        handles = way.export(forwarder.outgoing)
        arguments = gathering, [forwarder, *onward]
        thread = threading.Thread(target=_drain, args=arguments, name="rlsdk-pass-on", daemon=True)
        thread.start()
        passing.callback(forwarder.fail)
        seen = [
            Bucket(
                source=HOST,
                target=buckets[0].target,
                transport=way.name,
                transfers=tuple(transfers),
                num_bytes=sum(transfer.num_bytes for transfer in transfers),
                round=number,
            )
            for number, transfers in enumerate(rounds)
        ]
        return seen, {HOST: handles}, thread


def _anew(feed: MakeFeed) -> MakeFeed:
    """Asks for rings that no other process has attached to."""

    def make(buckets: deque[Bucket]) -> Feed:
        made = feed(buckets)
        made.anew = True
        return made

    return make


def _in_place_if_here(feed: MakeFeed) -> MakeFeed:
    """This process reads its own weights in place, however they were planned to reach the worker."""

    def make(buckets: deque[Bucket]) -> Feed:
        made = feed(buckets)
        made.in_place = made.peer is not None and made.peer.local() is not None
        return made

    return make


def _drain(gathering: Gathering, forwarders: Sequence[Forwarder]) -> None:
    try:
        for _ in teed(gathering.rounds(), forwarders):
            pass
    except Exception as error:
        for forwarder in forwarders:
            forwarder.fail(str(error))


def _reaches_workers(bucket: Bucket) -> bool:
    (kind,) = named_transports([bucket.transport])
    return kind.reaches_workers()
