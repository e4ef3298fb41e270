"""The cluster's object store as a transport: it always works between workers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import WeightLayout, WeightSyncError
from rlsdk.kit.ranks.object_store import get_store, has_store
from rlsdk.sharding.transports.transport import Outgoing, Transport
from rlsdk.sharding.transports.wire import (
    Metas,
    announcement,
    bucket_offsets,
    check_announcement,
    check_group,
    filled,
    groups,
    slots,
)


class ObjectStoreTransport(Transport):
    """Any two places. Between workers of one cluster the source puts the bytes into the store of its node, which sends
    them to the target's; an object is freed with its last handle, or with the worker that created it. In a process
    without a store, as of a test, the bytes are sent with the answer of the call, one bucket per call."""

    name = "object_store"
    call_bytes = 256 << 20

    @classmethod
    def most_bytes(cls) -> int | None:
        return cls.call_bytes if has_store() else 0

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return True

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        handles: list[Mapping[str, Any]] = []
        for bucket in buckets:
            data, sums = filled(bucket)
            # A numpy array instead of bytes: pickle protocol 5 transfers it without a copy.
            held = {"object": get_store().put(data.numpy())} if has_store() else {"data": data.numpy()}
            handles.append({**held, **announcement(len(data), sums)})
        return handles

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        num_bytes = check_announcement(handle, metas)
        data = handle["data"] if "data" in handle else get_store().get(handle["object"], self.timeout_s)
        if len(data) != num_bytes:
            raise WeightSyncError(f"a bucket of {num_bytes} bytes was asked for, but {len(data)} arrived")
        return self._give(data, handle, metas)

    def _give(self, data: NDArray[np.uint8], handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        """Copies through private memory, one group at once: the store's memory is read-only, and an engine that wrote
        into such a tensor would crash with a segmentation fault."""
        offsets, num_bytes = bucket_offsets(metas)
        parts = groups(offsets, num_bytes)
        private = torch.empty(max((span.stop - span.start for _, span in parts), default=0), dtype=torch.uint8)
        for (tensors, span), sent in zip(parts, handle["checksums"], strict=True):
            part = private[: span.stop - span.start]
            part.numpy()[:] = data[span]
            yield from slots(part, offsets[tensors], metas[tensors])
            check_group(part, sent)
