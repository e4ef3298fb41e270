"""The contract of a transport of weights between two processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import WeightLayout, WeightShard


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One bucket, as exported by its source."""

    metas: Sequence[tuple[tuple[int, ...], str]]
    """Shape and dtype on the wire of each shard."""
    take: Callable[[], Sequence[WeightShard]]
    """Returns the shards. Called once, when it is this bucket's turn."""
    device: torch.device | None = None
    """Device of the shards. None: the host."""
    is_here: bool = True
    """False: `take` waits until the shards have arrived from another process."""

    @classmethod
    def of(cls, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Outgoing:
        """A bucket of local shards, each with its dtype on the wire."""
        metas = [(shard.box.size, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
        return cls(metas=metas, take=lambda: shards, device=shards[0].tensor.device if shards else None)

    @property
    def dtypes(self) -> list[str]:
        return [dtype for _, dtype in self.metas]


class Transport(ABC):
    """Moves the bytes of buckets between two processes. One object at each end; the source side exports, the target
    side fetches. Besides the bytes, only a small plain handle per bucket is sent."""

    name: str
    stays_on_device: bool = False
    """Whether bytes between two accelerators never pass through host memory."""
    call_bytes: int | None = 0
    """Largest number of bytes that the source exports per call, or one bucket if that is more. None: any number of
    buckets, because it sends each while the target reads the previous one, through memory of bounded size."""
    shares_slots: bool = False
    """Whether targets that receive the same buckets from a source can read them from the same memory."""
    timeout_s: float = 600.0
    """Longest wait of this end for the other's next action; the target sets its own to that of the sync."""
    device: torch.device | None = None
    """On a target's end: the device of this process, in its own numbering. None: the host, or the current device."""

    @classmethod
    def most_bytes(cls) -> int | None:
        """`call_bytes`, where it depends on the process."""
        return cls.call_bytes

    @classmethod
    def reaches_workers(cls) -> bool:
        """Whether one answer of a source describes everything that a worker of an engine receives: workers cannot make
        calls. Otherwise their replica's process fetches for them."""
        return cls.call_bytes is None

    @classmethod
    @abstractmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        """Whether it can transfer between these two places. May depend only on whether process, node and device are the
        same, and on the kinds of the devices."""

    def start_sync(self) -> None:  # noqa: B027 - where a handle says all, nothing stays behind
        """Source side, before the first export of a sync: what was exported in an earlier one and never fetched is not
        for anybody any more."""

    @abstractmethod
    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        """Source side: makes the bytes of these buckets available, each shard converted to its dtype on the wire.

        Handles are plain (str, int, float, bytes), one per bucket. The shards may be read until the target has taken
        them. If `call_bytes` is 0, the memory of a handle is reused two exports to the same target later.
        """

    @abstractmethod
    def fetch(self, handle: Mapping[str, Any], metas: Sequence[tuple[tuple[int, ...], str]]) -> Iterator[Tensor]:
        """Target side: tensors of these (shape, dtype), in the order of the export; views if possible. Each is valid
        until the next is requested, and all have been checked when the iterator ends. Buckets are fetched in the order
        of their export.

        Raises:
            WeightSyncError: the bytes are gone, have another size, or do not match their checksum.
        """

    def close(self) -> None:  # noqa: B027 - a working default
        """Frees the resources of this end. Nothing may leak, not even after kill -9."""


def use_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Makes a GPU the current device of this thread: a new thread starts with device 0. No-op for other devices."""
    is_cuda = device is not None and device.type == "cuda"
    context: AbstractContextManager[Any] = torch.cuda.device(device) if is_cuda else nullcontext()
    return context
