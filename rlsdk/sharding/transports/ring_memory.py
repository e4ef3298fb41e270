"""Memory of a ring: slots that one process fills and others read, in host memory or on an accelerator.

An owner exports its slots once, as plain values; every reader opens them from those. The ring itself
(`rlsdk.sharding.transports.ring`) is the same for every kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlsdk.kit.ranks.shared_memory import AttachError, BlockName, SharedBlock, attach

Opener = Callable[[Mapping[str, Any], "torch.device | None"], Tensor]


class RingMemory(ABC):
    """The owner's end: `num_slots` slots of `slot_bytes` bytes each."""

    kind: str
    """Distinguishes what `export` returns; `open_memory` finds the opener by it."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes

    @property
    @abstractmethod
    def data(self) -> Tensor:
        """All slots, one after the other: at least `[num_slots * slot_bytes]` uint8."""

    @abstractmethod
    def export(self) -> dict[str, Any]:
        """Plain values with which another process opens the same memory."""

    def finish(self) -> None:  # noqa: B027 - host memory has nothing to wait for
        """Waits until all that was written has arrived."""


class HostMemory(RingMemory):
    """Anonymous shared memory: it has no name that could be left behind, however its processes end."""

    kind = "host"

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self._block = SharedBlock(num_slots * slot_bytes)

    @property
    def data(self) -> Tensor:
        return self._block.tensor

    def export(self) -> dict[str, Any]:
        name = self._block.name
        return {"path": name.path, "inode": name.inode, "block_bytes": name.num_bytes}


def open_host(exported: Mapping[str, Any], device: torch.device | None) -> Tensor:
    """Maps the slots of a `HostMemory`."""
    return attach(BlockName(exported["path"], exported["inode"], exported["block_bytes"]))


HANDLE = (
    "device", "memory", "memory_bytes", "memory_offset", "counter", "counter_offset", "event", "event_needed",
)  # fmt: skip
"""The values that `UntypedStorage._share_cuda_` returns, in order: plain numbers and bytes."""


class CudaMemory(RingMemory):
    """Device memory, exported by CUDA IPC. The driver frees it with the process that owns it. Written against torch's
    own handles and not yet run on a device."""

    kind = "cuda"

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        super().__init__(num_slots, slot_bytes)
        self._data = torch.empty(num_slots * slot_bytes, dtype=torch.uint8, device=device)

    @property
    def data(self) -> Tensor:
        return self._data

    def export(self) -> dict[str, Any]:
        storage: Any = self._data.untyped_storage()
        try:
            handle = dict(zip(HANDLE, storage._share_cuda_(), strict=True))
        except RuntimeError as error:
            raise AttachError(f"memory of {self._data.device} cannot be exported: {error}") from error
        return {**handle, "uuid": device_uuid(self._data.device)}

    def finish(self) -> None:
        torch.cuda.current_stream(self._data.device).synchronize()


def device_uuid(device: torch.device) -> str:
    """The physical device's name. `cuda:N` differs between processes that see other devices."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_device(uuid: str, own: torch.device | None) -> int:
    """This process's number of the device with this name. If it does not see that device, its own device: CUDA maps the
    memory of devices that a process does not see."""
    for number in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", number)) == uuid:
            return number
    return torch.cuda.current_device() if own is None or own.index is None else own.index


def open_cuda(exported: Mapping[str, Any], device: torch.device | None) -> Tensor:
    """Opens the slots of a `CudaMemory` of another process."""
    kind: Any = torch.UntypedStorage
    try:
        number = visible_device(exported["uuid"], device)
        _, *handle = (exported[field] for field in HANDLE)
        storage = kind._new_shared_cuda(number, *handle)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise AttachError(f"the source's memory on the device {exported['uuid']} cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{number}").set_(storage)


OPENERS: dict[str, Opener] = {HostMemory.kind: open_host, CudaMemory.kind: open_cuda}
"""By kind of memory."""


def open_memory(exported: Mapping[str, Any], device: torch.device | None = None) -> Tensor:
    """A reader's end of exported slots, at least `[num_slots * slot_bytes]` uint8.

    Args:
        exported: from the owner, with its `kind`.
        device: the reader's own device.

    Raises:
        AttachError: this process cannot open the owner's memory.
    """
    return OPENERS[exported["kind"]](exported, device)
