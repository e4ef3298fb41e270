"""Frees the memory of tensors and takes it back; the tensor objects and all views of them stay valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class HostOffload:
    """Moves the values of tensors to host memory and back.

    A storage is emptied in place (`resize_(0)`), so every view of it (the engine's, the optimizer's, `shards()`) is
    valid again after `onload`; no tensor object is replaced.
    """

    storages: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = field(default_factory=dict)
    """Part -> emptied storages, each with its bytes on the host (uint8)."""

    def offload(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Copies the memory of `tensors` to the host and frees it; storages that are already empty are skipped."""
        stored = self.storages.setdefault(part, [])
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")
            host.copy_(_bytes(storage))
            storage.resize_(0)
            stored.append((storage, host))

    def onload(self, part: str) -> None:
        """Allocates the memory of a part again and restores its values bit for bit."""
        for storage, host in self.storages.pop(part, []):
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)


class ReleasedMemory:
    """Frees the CPU memory of tensors without keeping their values, and allocates it again.

    Memory that something else maps (numpy, another process) cannot be freed: it is filled with zeros instead.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Any, int]] = {}

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Drops the values of `tensors` and frees their memory."""
        for tensor in tensors:
            storage: Any = tensor.untyped_storage()
            if storage.nbytes():
                self._sizes[storage._cdata] = (storage, storage.nbytes())
                if storage.resizable():
                    storage.resize_(0)
                else:
                    storage.fill_(0)

    def restore(self) -> None:
        """Allocates the memory again, filled with zeros."""
        for storage, size in self._sizes.values():
            if storage.resizable():
                storage.resize_(size)
            storage.fill_(0)
        self._sizes.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
