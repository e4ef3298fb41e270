"""Progress reports of an engine's workers to the process of their replica. Progress extends that process's wait for the
workers, and other processes' wait for it (`rlsdk.kit.ranks.progress`)."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rlsdk.interfaces import WeightShard, WeightSyncError
from rlsdk.kit.ranks.progress import advance
from rlsdk.kit.ranks.shared_memory import AttachError, BlockName, SharedBlock, attach
from rlsdk.sharding.transports.process_group import addresses

LOOK_S = 0.5
"""Seconds between the replica process's checks."""
MOST_AT_ONCE = 4096
"""Largest number of datagrams read per check."""


class WorkerProgress:
    """A progress counter per worker, in memory that all of them map; a worker on another node sends datagrams. If
    neither works, the replica waits for the whole pull with the deadline of one wait."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._block: SharedBlock | None = None
        self._far: RemoteProgress | None = None
        try:
            self._block = SharedBlock(8 * count, label="rlsdk-signs")
        except (AttributeError, OSError, WeightSyncError):  # no memfd_create on this system, or no memory
            return

    def of(self, worker: int, *, is_apart: bool = False) -> dict[str, Any] | None:
        """Plain values that a worker passes to `counted`.

        Args:
            worker: its index.
            is_apart: it is on another node.
        """
        if is_apart:
            self._far = self._far or RemoteProgress()
            return self._far.address
        if self._block is None:
            return None
        name = self._block.name
        return {"path": name.path, "inode": name.inode, "num_bytes": name.num_bytes, "at": worker}

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Within the block, progress of workers counts as progress of this process."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="rlsdk-signs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Frees the memory and the port."""
        if self._far is not None:
            self._far.close()
            self._far = None
        if self._block is not None:
            self._block.close()
            self._block = None

    def _watch(self, over: threading.Event) -> None:
        counters = None if self._block is None else self._block.tensor.view(torch.int64)[: self.count]
        seen = -1
        while not over.wait(LOOK_S):
            now = seen if counters is None else int(counters.sum())
            if now != seen or (self._far is not None and self._far.came()):
                seen = now
                advance()


class RemoteProgress:
    """Receives progress reports from workers on other nodes. Only datagrams with this replica's secret count; a forged
    one could only extend a wait."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("0.0.0.0", 0))
        self._socket.setblocking(False)
        self.address = {"hosts": addresses(), "port": self._socket.getsockname()[1], "secret": self._secret.hex()}
        """Plain values."""

    def came(self) -> bool:
        """Whether a report arrived since the last call."""
        found = False
        with suppress(OSError):
            for _ in range(MOST_AT_ONCE):  # a flood of foreign datagrams must not block the check
                found |= secrets.compare_digest(self._socket.recv(64), self._secret)
        return found

    def close(self) -> None:
        self._socket.close()


class _Sender:
    """A worker's end of `RemoteProgress`. Sends to every address of the other host, because it is unknown which
    works."""

    def __init__(self, sign: Mapping[str, Any]) -> None:
        self._secret = bytes.fromhex(sign["secret"])
        self._to = [(host, sign["port"]) for host in sign["hosts"]]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._last = -LOOK_S

    def send(self) -> None:
        """Sends at most a few reports per second."""
        if time.monotonic() - self._last < LOOK_S:
            return
        self._last = time.monotonic()
        for address in self._to:
            with suppress(OSError):
                self._socket.sendto(self._secret, address)

    def close(self) -> None:
        self._socket.close()


def counted(shards: Iterator[WeightShard], sign: Mapping[str, Any] | None) -> Iterator[WeightShard]:
    """Yields the shards and counts each as progress."""
    if sign is not None and "hosts" in sign:
        sender = _Sender(sign)
        try:
            for shard in shards:
                sender.send()
                yield shard
        finally:
            sender.close()
        return
    counters, at = None, 0
    if sign is not None:
        at = sign["at"]
        with suppress(AttachError):
            counters = attach(BlockName(sign["path"], sign["inode"], sign["num_bytes"])).view(torch.int64)
    for shard in shards:
        if counters is not None:
            counters[at] += 1
        yield shard
