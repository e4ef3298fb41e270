"""What every way for weights between two processes has to hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlsdk.interfaces import WeightLayout, WeightShard


class Transport(ABC):
    """Moves the bytes of a bucket between two processes. One object at each end; the source side exports, the target
    side fetches. What crosses besides the bytes is the small plain handle that `export` returns."""

    name: str
    stays_on_device: bool = False
    """Between two accelerators the bytes never pass through the host's memory."""
    timeout_s: float = 600.0
    """Longest that this end waits for the other; the target sets its own to what is left of the sync's deadline."""

    @classmethod
    @abstractmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        """True when it can move bytes between these two places."""

    @abstractmethod
    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        """Source side: makes the bytes available, each shard converted to its dtype on the wire. The handle is plain
        (str, int, float, bytes). The shards may be read until the target has taken them; the memory behind the
        handle is reused two exports to the same target later."""

    @abstractmethod
    def fetch(self, handle: Mapping[str, Any], metas: Sequence[tuple[tuple[int, ...], str]]) -> Iterator[Tensor]:
        """Target side: tensors of these (shape, dtype), in the order of the export; views where that is possible. Each
        is valid until the next is asked for, and all were checked by the time the iterator ends.

        Raises:
            WeightSyncError: the bytes are gone, of another size, or fail their checksum.
        """

    def close(self) -> None:  # noqa: B027 - a working default
        """Frees what this end created; nothing may stay behind, not even after kill -9."""
