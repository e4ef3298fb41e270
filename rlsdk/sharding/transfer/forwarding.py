"""Forwards arriving weights to another process, one round at a time, while the next rounds arrive."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from rlsdk.interfaces import Bucket, Transfer, WeightShard, WeightSyncError
from rlsdk.sharding.transports.transport import Outgoing

LOOK_S = 0.1
"""Seconds between a waiting thread's checks of whether the pull was aborted."""


def merged_rounds(buckets: Sequence[Bucket], order: Mapping[str, int]) -> list[list[Transfer]]:
    """The transfers of each round, in the order of `Gathering`: by name, then by bucket."""
    return [
        list(heapq.merge(*(bucket.transfers for bucket in group), key=lambda transfer: order[transfer.name]))
        for _, group in groupby(buckets, key=lambda bucket: (bucket.target, bucket.round))
    ]


class Forwarder:
    """Forwards rounds from one process to another. Holds at most two rounds: one being sent, one waiting."""

    def __init__(
        self, rounds: Sequence[Sequence[Transfer]], timeout_s: float, device: torch.device | None = None
    ) -> None:
        """
        Args:
            rounds: from `merged_rounds`.
            timeout_s: longest wait for one round to arrive or to be taken.
            device: device on which they arrive.
        """
        self._timeout_s = timeout_s
        self._waiting: queue.Queue[Sequence[WeightShard]] = queue.Queue(maxsize=1)
        self._failed = threading.Event()
        self._why = "the pull was broken off"
        self.outgoing = [
            Outgoing(metas=[(t.box.size, t.dtype) for t in transfers], take=self._take, device=device, is_here=False)
            for transfers in rounds
        ]

    def put(self, shards: Sequence[WeightShard]) -> None:
        """Forwards a round; its memory belongs to this object from now on.

        Raises:
            WeightSyncError: the other process does not take it in time, or the pull was aborted.
        """
        end = time.monotonic() + self._timeout_s
        while not self._failed.is_set():
            try:
                return self._waiting.put(shards, timeout=LOOK_S)
            except queue.Full:
                if time.monotonic() > end:
                    break
        raise WeightSyncError(self._reason("weights that go on to another process were not taken there"))

    def fail(self, why: str | None = None) -> None:
        """Ends the threads that wait here: no more rounds will come."""
        self._why = why or self._why
        self._failed.set()

    def _take(self) -> Sequence[WeightShard]:
        end = time.monotonic() + self._timeout_s
        while not self._failed.is_set():
            try:
                return self._waiting.get(timeout=LOOK_S)
            except queue.Empty:
                if time.monotonic() > end:
                    break
        raise WeightSyncError(self._reason("weights that were to be passed on did not arrive"))

    def _reason(self, missing: str) -> str:
        return f"{missing}: {self._why if self._failed.is_set() else f'nothing moved for {self._timeout_s:g} s'}"


def teed(
    rounds: Iterable[Iterator[WeightShard]], forwarders: Sequence[Forwarder]
) -> Generator[WeightShard, None, None]:
    """Yields every shard of every round, and passes a copy of each round to the forwarders."""
    for shards in rounds:
        kept: list[WeightShard] = []
        for shard in shards:
            if forwarders:
                kept.append(replace(shard, tensor=shard.tensor.clone()))
            yield shard
        for forwarder in forwarders:
            forwarder.put(kept)
