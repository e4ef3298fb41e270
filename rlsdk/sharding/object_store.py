"""Ray's object store as a transport: the one that always works between workers of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import Transport, WeightLayout, WeightShard, WeightSyncError
from rlsdk.sharding.wire import (
    Metas,
    announcement,
    bucket_offsets,
    check_announcement,
    check_group,
    fill,
    groups,
    slots,
)


class ObjectStoreTransport(Transport):
    """Any two workers of one Ray cluster: the source puts the bytes into the object store of its node, and Ray brings
    them to the target's. An object goes with its last handle; what a dead worker owned, Ray frees."""

    name = "object_store"

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        # A process that plans for Ray workers has it loaded; one that does not must not start to.
        ray = sys.modules.get("ray")
        return ray is not None and ray.is_initialized()

    def export(self, shards: Sequence[WeightShard], dtypes: Sequence[str]) -> Mapping[str, Any]:
        import ray

        offsets, num_bytes = bucket_offsets([(s.box.size, d) for s, d in zip(shards, dtypes, strict=True)])
        data = torch.empty(num_bytes, dtype=torch.uint8)
        sums = fill(data, offsets, shards, dtypes)
        return {"object": ray.put(data.numpy()), **announcement(num_bytes, sums)}

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        import ray

        num_bytes = check_announcement(handle, metas)
        try:
            data = ray.get(handle["object"], timeout=self.timeout_s)
        except ray.exceptions.RayError as error:
            raise WeightSyncError(f"the object store did not bring {num_bytes} bytes: {error}") from error
        if len(data) != num_bytes:
            raise WeightSyncError(f"a bucket of {num_bytes} bytes was asked for, but {len(data)} arrived")
        return self._give(data, handle, metas)

    def _give(self, data: NDArray[np.uint8], handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        """Through private memory of one group: the store's own is read-only, and an engine that wrote into a tensor
        of it would die of a segmentation fault."""
        offsets, num_bytes = bucket_offsets(metas)
        parts = groups(offsets, num_bytes)
        private = torch.empty(max((span.stop - span.start for _, span in parts), default=0), dtype=torch.uint8)
        for (tensors, span), sent in zip(parts, handle["checksums"], strict=True):
            part = private[: span.stop - span.start]
            part.numpy()[:] = data[span]
            yield from slots(part, offsets[tensors], metas[tensors])
            check_group(part, sent)
