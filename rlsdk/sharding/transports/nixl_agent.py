"""This process's NIXL agent, the memory that it has registered, and the agents that it knows.

NIXL (https://github.com/ai-dynamo/nixl) reads and writes the memory of another process by any connection that UCX finds
between the two: RDMA, TCP, shared memory. The library is optional (`pip install "rlsdk[nixl]"`) and imported when the
first transport needs it.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import ConfigError, WeightSyncError

LIBRARY = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
"""Possible modules of the library: the package that selects by CUDA version, or one of those that it selects from."""
_EVER = 1 << 62
"""Version recorded for this agent itself, so that it never needs its own introduction."""
LOOK_S = 0.0002
"""Seconds between checks of a transfer."""
Runs = NDArray[np.uint64]
"""`[N, 3]`: address, bytes, device index of each run of memory."""


@dataclass
class _Remote:
    """Local information about another process's agent."""

    version: int
    dropped: int
    reads: int = 0
    """Number of running transfers."""


class Agent:
    """One per process, shared by its transports. Memory stays registered between syncs: its own until
    `forget`, an engine's until it is freed."""

    def __init__(self) -> None:
        """Raises `ConfigError` if the library is not installed."""
        api = _library()
        self.name = f"rlsdk-{uuid.uuid4().hex}"
        config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = api.nixl_agent(self.name, config)
        self._changed = threading.Condition(threading.RLock())
        self._regions: dict[tuple[int, int, int], Any] = {}
        """Registered regions by address, bytes and device index."""
        self._freed: deque[tuple[int, int, int]] = deque()
        self._remotes: dict[str, _Remote] = {self.name: _Remote(_EVER, 0)}
        self._version = self._dropped = 0
        """Number of changes (registered or forgotten regions), and number of forgotten regions."""
        self._kept: list[Tensor] = []
        """Memory into which an aborted transfer may still write."""

    @property
    def registered_bytes(self) -> int:
        """Bytes of all registered regions."""
        with self._changed:
            self._forget_freed()
            return sum(num_bytes for _, num_bytes, _ in self._regions)

    def register(self, tensor: Tensor) -> None:
        """Makes the whole memory of a tensor readable and writable for other processes, until it is freed. Does nothing
        if the memory is already registered."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes(), max(tensor.get_device(), 0)
        with self._changed:
            self._forget_freed()
            if not key[1] or key in self._regions:
                return
            self._regions[key] = self._agent.register_memory([(*key, "")], memory_kind(tensor.device))
            self._version += 1
            # Called when the last tensor of this memory is freed, at any point in any thread: it only records that.
            weakref.finalize(storage, self._freed.append, key)

    def forget(self, tensor: Tensor) -> None:
        """Unregisters the memory of a tensor: no other process may access it any more."""
        storage = tensor.untyped_storage()
        with self._changed:
            self._forget((storage.data_ptr(), storage.nbytes(), max(tensor.get_device(), 0)))

    def introduction(self) -> dict[str, Any]:
        """The information that another agent needs to read this memory, as plain values."""
        with self._changed:
            self._forget_freed()
            metadata: bytes = self._agent.get_agent_metadata()
            return {"metadata": metadata, "version": self._version, "dropped": self._dropped}

    def meet(self, name: str, introduction: Mapping[str, Any], timeout_s: float) -> None:
        """Adds another agent, or memory that it has registered since.

        Raises:
            WeightSyncError: its process cannot be reached, or a read from it does not end in time.
        """
        version, dropped = introduction["version"], introduction["dropped"]
        with self._changed:
            known = self._remotes.get(name)
            if known is not None and known.version >= version:
                return
            if known is not None and known.dropped != dropped:
                # Memory may have been reused for something else: the other agent is added again.
                if not self._changed.wait_for(lambda: not known.reads, timeout_s):
                    raise WeightSyncError(f"a read from the agent {name} did not end in {timeout_s:g} s")
                self._agent.remove_remote_agent(name)
            try:
                self._agent.add_remote_agent(introduction["metadata"])
            except Exception as error:  # The library's exceptions have no common base class.
                raise WeightSyncError(f"the source's memory cannot be reached by NIXL: {_why(error)}") from error
            self._remotes[name] = _Remote(version, dropped)

    def move(self, way: str, here: tuple[Runs, str], there: tuple[Runs, str], name: str, timeout_s: float) -> None:
        """Reads from another process (`READ`) or writes there (`WRITE`); returns when it is done.

        Args:
            way: `READ` or `WRITE`.
            here: runs of registered memory of this process, and its kind.
            there: equally many runs of the same sizes in the other process, and their kind.
            name: name of the other agent.
            timeout_s: longest wait.

        Raises:
            WeightSyncError: the other process is gone, or the wait timed out.
        """
        with self._changed:
            remote = self._remotes.get(name)
            if remote is None:
                raise WeightSyncError("the connection to the source was ended before")
            remote.reads += 1
        handle = None
        try:
            ours, theirs = (self._agent.get_xfer_descs(runs, kind) for runs, kind in (here, there))
            handle = self._agent.initialize_xfer(way, ours, theirs, name)
            state, end = self._agent.transfer(handle), time.monotonic() + timeout_s
            while state == "PROC":
                if time.monotonic() > end:
                    raise WeightSyncError(f"nothing came from the source for {timeout_s:g} s")
                time.sleep(LOOK_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise WeightSyncError("the source is gone, or let go of its memory")
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"the source is gone, or let go of its memory: {_why(error)}") from error
        finally:
            if handle is not None:
                with suppress(Exception):
                    handle.release()
            with self._changed:
                remote.reads -= 1
                self._changed.notify_all()

    def give_up(self, name: str, tensors: list[Tensor]) -> None:
        """Ends the connection to an agent that no longer answers. The memory that it would fill is kept as long as
        this process has an agent, because a late answer may still be written there."""
        with self._changed:
            self._kept.extend(tensors)
            if name != self.name and self._remotes.pop(name, None) is not None:
                with suppress(Exception):
                    self._agent.remove_remote_agent(name)

    def close(self) -> None:
        """Unregisters all memory and ends all connections."""
        with self._changed:
            for name in self._remotes.keys() - {self.name}:
                with suppress(Exception):
                    self._agent.remove_remote_agent(name)
            self._remotes.clear()
            for key in list(self._regions):
                self._forget(key)
            self._agent = None
            self._kept.clear()

    def _forget_freed(self) -> None:
        while self._freed:
            self._forget(self._freed.popleft())

    def _forget(self, key: tuple[int, int, int]) -> None:
        region = self._regions.pop(key, None)
        if region is not None:
            self._agent.deregister_memory(region)
            self._version += 1
            self._dropped += 1


class _OfProcess:
    lock = threading.Lock()
    agent: Agent | None = None
    users = 0


def borrow() -> Agent:
    """Returns this process's agent and adds a user."""
    with _OfProcess.lock:
        if _OfProcess.agent is None:
            _OfProcess.agent = Agent()
        _OfProcess.users += 1
        return _OfProcess.agent


def give_back() -> None:
    """Removes a user; the last one ends the agent."""
    with _OfProcess.lock:
        _OfProcess.users -= 1
        if not _OfProcess.users and _OfProcess.agent is not None:
            _OfProcess.agent.close()
            _OfProcess.agent = None


def memory_kind(device: torch.device) -> str:
    """NIXL's name of the kind of memory."""
    return "DRAM" if device.type == "cpu" else "VRAM"


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _library() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # Otherwise it reports its start on stdout.
    for name in LIBRARY:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            last = error
    raise ConfigError(
        f"sharding.transport: nixl needs the package nixl in the environment of every training and rollout process "
        f'({last}). Install it: pip install "rlsdk[nixl]"'
    )
