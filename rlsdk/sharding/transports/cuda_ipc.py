"""CUDA IPC: transfers between two processes on one GPU, without the host. Written against torch's own handles and not
yet run on a GPU: if a handle cannot be opened, the sync continues through the host (`target.fetch`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import WeightLayout
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding.transports.transport import Outgoing, Transport
from rlsdk.sharding.transports.wire import Metas, announcement, bucket_offsets, check_announcement, checked, fill

HANDLE = (
    "device", "memory", "memory_bytes", "memory_offset", "counter", "counter_offset", "event", "event_needed",
)  # fmt: skip
"""The values that `UntypedStorage._share_cuda_` returns, in order: plain numbers and bytes."""


class CudaIpcTransport(Transport):
    """Two processes on one GPU: the source copies into device memory that the target opens by its handle. Two blocks
    alternate and are kept between syncs; the driver frees them with the process that created them."""

    name = "cuda_ipc"
    stays_on_device = True

    def __init__(self) -> None:
        self._blocks: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._handles: list[dict[str, Any]] = [{}, {}]
        self._turn = 0
        self._opened: dict[tuple[bytes, int], Tensor] = {}

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        here = (source.node, source.device) == (target.node, target.device)
        return here and source.device.startswith("cuda") and source.process != target.process

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        return [self._export(bucket) for bucket in buckets]

    def _export(self, bucket: Outgoing) -> Mapping[str, Any]:
        offsets, num_bytes = bucket_offsets(bucket.metas)
        shards = bucket.take()
        self._turn = 1 - self._turn
        if len(self._blocks[self._turn]) < num_bytes:
            self._blocks[self._turn] = self._take(num_bytes, shards[0].tensor.device)
            self._handles[self._turn] = self._share(self._blocks[self._turn])
        block = self._blocks[self._turn]
        # The host reads each checksum, so the whole bucket has been copied before the handle is sent.
        sums = fill(block[:num_bytes], offsets, shards, bucket.dtypes)
        return {**self._handles[self._turn], **announcement(num_bytes, sums)}

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        num_bytes = check_announcement(handle, metas)
        if not num_bytes:
            return checked(torch.empty(0, dtype=torch.uint8), handle, metas)
        key = handle["memory"], handle["memory_offset"]
        if key not in self._opened:
            try:
                self._opened[key] = self._open({field: handle[field] for field in HANDLE})
            except RuntimeError as error:
                raise AttachError(
                    f"the source's memory on cuda:{handle['device']} cannot be opened: {error}"
                ) from error
        return checked(self._opened[key], handle, metas)

    def close(self) -> None:
        self._blocks = [torch.empty(0, dtype=torch.uint8)] * 2
        self._handles = [{}, {}]
        self._opened.clear()

    def _take(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _share(self, block: Tensor) -> dict[str, Any]:
        storage: Any = block.untyped_storage()
        return dict(zip(HANDLE, storage._share_cuda_(), strict=True))

    def _open(self, handle: Mapping[str, Any]) -> Tensor:
        kind: Any = torch.UntypedStorage
        storage = kind._new_shared_cuda(*handle.values())
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{handle['device']}").set_(storage)
