"""Offload to host memory: values move to the host, and the tensor objects stay valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Parking:
    """Storages whose bytes are on the host.

    A storage is emptied in place, so every view of it (the engine's, the optimizer's, `shards()`) is valid again once
    its bytes are back; no tensor object is replaced.
    """

    lots: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = field(default_factory=dict)
    """Part -> emptied storages with their bytes."""

    def leave(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Copies the memory of `tensors` to the host and frees it. A part that is away already stays away."""
        lot = self.lots.setdefault(part, [])
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")
            host.copy_(_bytes(storage))
            storage.resize_(0)
            lot.append((storage, host))

    def back(self, part: str) -> None:
        """Undoes `leave`, bit for bit."""
        for storage, host in self.lots.pop(part, []):
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
