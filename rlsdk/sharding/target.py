"""The serving side of a sync: pulls buckets from their sources and feeds them to the rollout engine."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from rlsdk.interfaces import (
    Bucket,
    Peer,
    RolloutEngine,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
)
from rlsdk.kit.shared_memory import AttachError
from rlsdk.sharding.cuda_ipc import CudaIpcTransport
from rlsdk.sharding.devices import on_physical_device
from rlsdk.sharding.fetching import OpenTransports
from rlsdk.sharding.transports import (
    InlineTransport,
    InProcessTransport,
    SharedFileTransport,
    SharedMemoryTransport,
)
from rlsdk.sharding.wire import MAX_BUCKET_BYTES

MAX_CALLS = 8
"""Sources that one target asks at the same time."""
_NEXT_BEST = {
    CudaIpcTransport.name: SharedMemoryTransport.name,
    SharedMemoryTransport.name: SharedFileTransport.name,
    SharedFileTransport.name: InlineTransport.name,
}
"""What to try where a block cannot be attached from this process."""
_log = logging.getLogger(__name__)


class WeightTarget:
    """One per replica. Takes one round of buckets at a time and asks for the next while the engine loads it: at most
    two rounds exist at once."""

    def __init__(self, engine: RolloutEngine, accelerators: Sequence[str] = ()) -> None:
        """`accelerators`: as in `RankContext`."""
        self._engine = engine
        self._accelerators = accelerators
        self._transports = OpenTransports()
        self._instead: dict[tuple[str, int], str] = {}
        self._layouts: tuple[WeightLayout, ...] = ()
        self._last: Sequence[Bucket] = ()
        self._joined: tuple[Sequence[Bucket], list[list[Bucket]]] = ((), [])

    def layouts(self) -> Sequence[WeightLayout]:
        """What the replica wants, one per place that weights are delivered to."""
        if not self._layouts:
            self._layouts = tuple(on_physical_device(layout, self._accelerators) for layout in self._engine.layout())
        return self._layouts

    def order(self) -> Mapping[str, int]:
        """Position of each tensor: the order in which the plan brings them."""
        names = dict.fromkeys(name for layout in self.layouts() for name, _ in layout.boxes)
        return {name: at for at, name in enumerate(names)}

    def pull(self, buckets: Sequence[Bucket], peers: Mapping[int, Peer], version: int, timeout_s: float) -> SyncReceipt:
        """Brings every bucket and gives it to the engine, which then serves `version`.

        Args:
            buckets: all that this replica takes, in the plan's order.
            peers: the source ranks that the buckets name.
            version: what the engine serves afterwards.
            timeout_s: for the whole pull.

        Raises:
            WeightSyncError: a bucket did not come, the engine refused it, or did not take them all.
        """
        start = time.perf_counter()
        if buckets == self._last:
            buckets = self._last  # Whose objects are made already, where a plan makes them when they are asked for.
        self._last = buckets
        intake = _Intake(self, self._transports, buckets, peers, version, time.monotonic() + timeout_s)
        try:
            with closing(intake.shards()) as shards:
                receipt = self._engine.update_weights(shards, version)
        except BaseException:
            # Sources still have ready what nobody will take: that they are let go of tells them.
            self.close()
            raise
        if intake.taken < intake.wanted:
            raise WeightSyncError(
                f"the rollout engine took {intake.taken} of {intake.wanted} pieces of version {version} and stopped at "
                f"{intake.last_name!r}: update_weights must take every item"
            )
        if receipt.version != version:
            raise WeightSyncError(f"the rollout engine was sent version {version} and says it serves {receipt.version}")
        return replace(receipt, seconds=time.perf_counter() - start)

    def close(self) -> None:
        """Lets go of the memory that transports map."""
        held, self._transports = self._transports, OpenTransports()
        held.close()

    def fetch(self, bucket: Bucket, peer: Peer, deadline: float, transports: OpenTransports) -> Iterator[WeightShard]:
        """One bucket's shards, once its source has them ready. Falls back to the next best transport where the
        bucket's cannot be attached."""
        route = (bucket.transport, bucket.source)
        while True:
            chosen = replace(bucket, transport=self._instead.get(route, bucket.transport))
            try:
                return transports.fetch(chosen, peer, deadline)
            except AttachError as error:
                # What was mapped before and is gone is no reason to take another way, least of all a bucket of many.
                if chosen.transport not in _NEXT_BEST or self._in_place(bucket):
                    raise
                self._instead[route] = _NEXT_BEST[chosen.transport]
                _log.warning(
                    "weights of source rank %d cannot come by %s (%s); from now on by %s",
                    bucket.source, chosen.transport, error, self._instead[route],
                )  # fmt: skip

    def rounds(self, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
        """The buckets to ask for at once, in turn. Where the last sync read weights where they are, there is no memory
        to bound: all rounds but the first are one, and cost each source one call."""
        rounds = [list(group) for _, group in groupby(buckets, key=lambda bucket: (bucket.target, bucket.round))]
        if len(rounds) < 3 or not all(map(self._in_place, buckets)):
            return rounds
        if self._joined[0] is not buckets:
            self._joined = buckets, [rounds[0], *_joined(rounds[1:])]
        return self._joined[1]

    def _in_place(self, bucket: Bucket) -> bool:
        transport = self._transports.find(bucket)
        return isinstance(transport, SharedMemoryTransport) and transport.in_place


def _joined(rounds: Sequence[Sequence[Bucket]]) -> list[list[Bucket]]:
    """Rounds of one target after another as one, as far as a bucket may go."""
    found: list[list[list[Bucket]]] = []
    room = 0
    for buckets in rounds:
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        if not found or found[-1][0][0].target != buckets[0].target or num_bytes > room:
            found.append([])
            room = MAX_BUCKET_BYTES
        found[-1].append(list(buckets))
        room -= num_bytes
    return [_one_round(group) for group in found]


def _one_round(rounds: Sequence[Sequence[Bucket]]) -> list[Bucket]:
    by_source: dict[int, list[Bucket]] = {}
    for bucket in (bucket for buckets in rounds for bucket in buckets):
        by_source.setdefault(bucket.source, []).append(bucket)
    return [
        replace(
            parts[0],
            transfers=tuple(transfer for part in parts for transfer in part.transfers),
            num_bytes=sum(part.num_bytes for part in parts),
        )
        for parts in by_source.values()
    ]


class _Asked(NamedTuple):
    """A bucket on its way."""

    bucket: Bucket
    answer: Future[Iterator[WeightShard]] | None
    """None: it is in this process, and taken directly."""


class _Intake:
    """One pull under way: what the engine iterates over, and how much of it was taken."""

    def __init__(
        self,
        target: WeightTarget,
        transports: OpenTransports,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Peer],
        version: int,
        deadline: float,
    ) -> None:
        self._target = target
        self._transports = transports
        self._peers = peers
        self._version = version
        self._deadline = deadline
        self._order = target.order()
        self._rounds = target.rounds(buckets)
        self.wanted = sum(len(bucket.transfers) for bucket in buckets)
        self.taken = 0
        self.last_name: str | None = None

    def shards(self) -> Generator[WeightShard, None, None]:
        """Every shard, all of one name together; the next round is asked for while this one is loaded."""
        pool = ThreadPoolExecutor(max_workers=MAX_CALLS, thread_name_prefix="rlsdk-pull")
        try:
            ahead = self._ask(pool, 0)
            for at in range(len(self._rounds)):
                asked = ahead
                # One export of a source at a time: only then do its two blocks surely take turns.
                wait([answer for _, answer in asked if answer is not None])
                ahead = self._ask(pool, at + 1)
                for shard in heapq.merge(*map(self._arrive, asked), key=lambda shard: self._order[shard.name]):
                    self.taken += 1
                    self.last_name = shard.name
                    yield shard
        finally:
            # Not waited for: a source that hangs must not hold up the error. Its own deadline ends the thread.
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, pool: ThreadPoolExecutor, at: int) -> list[_Asked]:
        """Starts to bring a round, if there is one of that number. Views within the process need no thread, and are
        made when they are wanted."""
        return [
            _Asked(
                bucket,
                None if bucket.transport == InProcessTransport.name else pool.submit(self._fetch, bucket),
            )
            for bucket in (self._rounds[at] if at < len(self._rounds) else ())
        ]

    def _fetch(self, bucket: Bucket) -> Iterator[WeightShard]:
        return self._target.fetch(bucket, self._peers[bucket.source], self._deadline, self._transports)

    def _arrive(self, asked: _Asked) -> Iterator[WeightShard]:
        """The shards of one bucket."""
        bucket = asked.bucket
        try:
            if asked.answer is None:
                yield from self._fetch(bucket)
            else:
                yield from asked.answer.result()
        except Exception as error:
            names = sorted({transfer.name for transfer in bucket.transfers})
            raise WeightSyncError(
                f"version {self._version}: {bucket.num_bytes} bytes of {names[0]!r} and {len(names) - 1} more tensors "
                f"did not arrive from source rank {bucket.source} by {bucket.transport}: "
                f"{type(error).__name__}: {error}"
            ) from error
