"""Frees and reallocates CPU memory of tensors that others hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Parked:
    """Storages whose memory was given back; the tensors that look into them stay valid objects.

    Memory that something else looks into (numpy, another process) cannot be given back: its values are dropped all the
    same, and it is there throughout.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Any, int]] = {}

    def empty(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage: Any = tensor.untyped_storage()
            if storage.nbytes():
                self._sizes[storage._cdata] = (storage, storage.nbytes())
                if storage.resizable():
                    storage.resize_(0)
                else:
                    storage.fill_(0)

    def restore(self) -> None:
        """Takes the memory again, filled with zeros."""
        for storage, size in self._sizes.values():
            if storage.resizable():
                storage.resize_(size)
            storage.fill_(0)
        self._sizes.clear()
