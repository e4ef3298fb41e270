"""Signs of progress of an engine's workers, for the process of their replica: it waits for them, and whoever waits for
it waits as long as something moves (`rlsdk.kit.progress`)."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rlsdk.interfaces import WeightShard, WeightSyncError
from rlsdk.kit.progress import advance
from rlsdk.kit.shared_memory import AttachError, BlockName, SharedBlock, attach

LOOK_S = 0.5
"""How often the replica's process looks."""


class Signs:
    """A counter per worker, in memory that all of them map. On another node, or where memory cannot be shared, a worker
    gives no signs: its replica then has the time of one wait for the whole of the pull."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._block: SharedBlock | None = None
        try:
            self._block = SharedBlock(8 * count, anonymous=True, label="rlsdk-signs")
        except (AttributeError, OSError, WeightSyncError):  # no memfd_create on this system, or no memory
            return

    def of(self, worker: int) -> dict[str, Any] | None:
        """What a worker gives to `counted`; plain values."""
        if self._block is None:
            return None
        name = self._block.name
        return {"path": name.path, "inode": name.inode, "num_bytes": name.num_bytes, "at": worker}

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Until the end of the block, what workers count is progress of this process."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="rlsdk-signs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Frees the memory."""
        if self._block is not None:
            self._block.close()
            self._block = None

    def _watch(self, over: threading.Event) -> None:
        if self._block is None:
            return
        counters, seen = self._block.tensor.view(torch.int64)[: self.count], -1
        while not over.wait(LOOK_S):
            now = int(counters.sum())
            if now != seen:
                seen = now
                advance()


def counted(shards: Iterator[WeightShard], sign: Mapping[str, Any] | None) -> Iterator[WeightShard]:
    """The shards; each is counted as it is given out."""
    counters, at = None, 0
    if sign is not None:
        at = sign["at"]
        with suppress(AttachError):
            counters = attach(BlockName(sign["path"], sign["inode"], sign["num_bytes"], unlink=False)).view(torch.int64)
    for shard in shards:
        if counters is not None:
            counters[at] += 1
        yield shard
