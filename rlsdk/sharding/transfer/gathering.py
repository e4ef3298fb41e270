"""A pull in progress: buckets of many sources, received round by round, as one stream of shards."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from typing import NamedTuple

from rlsdk.interfaces import Bucket, WeightShard, WeightSyncError
from rlsdk.kit.ranks.progress import advance
from rlsdk.sharding.transfer.fetching import Feed

MAX_CALLS = 8
"""Number of sources from which one target requests concurrently."""


MakeFeed = Callable[[deque[Bucket]], Feed]
"""Creates the feed for the buckets that one source sends to one target."""


def feeds_of(buckets: Sequence[Bucket], feed: MakeFeed) -> dict[tuple[int, int], Feed]:
    """(target, source) -> feed of the buckets between them, in order."""
    routes: dict[tuple[int, int], deque[Bucket]] = {}
    for bucket in buckets:
        routes.setdefault((bucket.target, bucket.source), deque()).append(bucket)
    return {route: feed(mine) for route, mine in routes.items()}


class _Asked(NamedTuple):
    """A requested bucket."""

    bucket: Bucket
    feed: Feed
    answer: Future[Iterator[WeightShard]] | None
    """None: the source is in this process and read directly."""


class Gathering:
    """The stream of shards over which an engine iterates, and its progress. The next round is requested while one is
    loaded: at most two rounds are in memory."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: Mapping[str, int],
        feed: MakeFeed,
        version: int,
    ) -> None:
        """
        Args:
            buckets: all buckets to receive, in the plan's order.
            order: position of each tensor in the plan's order.
            feed: creates the feed of one source's buckets for one target.
            version: version for messages.
        """
        self._rounds = [list(group) for _, group in groupby(buckets, key=lambda b: (b.target, b.round))]
        self._order = order
        self._version = version
        self._feeds = feeds_of(buckets, feed)
        self.wanted = sum(len(bucket.transfers) for bucket in buckets)
        self.taken = 0
        self.taken_bytes = 0
        self.last_name: str | None = None

    def rounds(self) -> Generator[Iterator[WeightShard], None, None]:
        """The shards of each round, contiguous by name; each round must be read to its end before the next."""
        pool = ThreadPoolExecutor(max_workers=MAX_CALLS, thread_name_prefix="rlsdk-pull")
        try:
            ahead = self._ask(pool, 0)
            for at in range(len(self._rounds)):
                asked = ahead
                # Only one export per source runs, so that its two blocks are sure to alternate.
                wait([answer for _, _, answer in asked if answer is not None])
                ahead = self._ask(pool, at + 1)
                yield self._merged(asked)
        finally:
            # Not joined: a hanging source must not delay the error. Its own time limit ends the thread.
            pool.shutdown(wait=False, cancel_futures=True)

    def _merged(self, asked: Sequence[_Asked]) -> Iterator[WeightShard]:
        for shard in heapq.merge(*map(self._arrive, asked), key=lambda shard: self._order[shard.name]):
            self.taken += 1
            self.taken_bytes += shard.tensor.nbytes
            self.last_name = shard.name
            advance()
            yield shard

    def _ask(self, pool: ThreadPoolExecutor, at: int) -> list[_Asked]:
        """Requests the round with this number, if there is one. Views within the process need no thread, and are
        created when they are read."""
        found = []
        for bucket in self._rounds[at] if at < len(self._rounds) else ():
            feed = self._feeds[bucket.target, bucket.source]
            found.append(_Asked(bucket, feed, None if feed.is_local else pool.submit(feed.next)))
        return found

    def _arrive(self, asked: _Asked) -> Iterator[WeightShard]:
        """The shards of one bucket."""
        bucket = asked.bucket
        try:
            yield from asked.feed.next() if asked.answer is None else asked.answer.result()
        except Exception as error:
            names = sorted({transfer.name for transfer in bucket.transfers})
            raise WeightSyncError(
                f"version {self._version}: {bucket.num_bytes} bytes of {names[0]!r} and {len(names) - 1} more tensors "
                f"did not arrive from source rank {bucket.source} by {bucket.transport}: "
                f"{type(error).__name__}: {error}"
            ) from error
