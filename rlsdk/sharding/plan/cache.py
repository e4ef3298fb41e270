"""Cache of plans: an unchanged layout is planned only once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from rlsdk.interfaces import ReshardPlan, WeightLayout
from rlsdk.sharding.plan.planner import plan_reshard
from rlsdk.sharding.transports.transport import Transport

MAX_PLANS = 4
"""Number of cached plans: for training and evaluation replicas, each before and after a restart."""


class PlanCache:
    """Plans by the hash of their inputs; the least recently used plan is dropped first."""

    def __init__(self, *, bucket_bytes: int, transports: Sequence[type[Transport]]) -> None:
        self.bucket_bytes = bucket_bytes
        self.transports = tuple(transports)
        self.num_planned = 0
        self._plans: OrderedDict[tuple[str, str], ReshardPlan] = OrderedDict()
        self._hashed: list[tuple[Sequence[WeightLayout], str]] = []

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        """As `plan_reshard`, which it calls only for layouts without a cached plan."""
        key = self._hash(source), self._hash(target)
        if key not in self._plans:
            self._plans[key] = plan_reshard(source, target, bucket_bytes=self.bucket_bytes, transports=self.transports)
            self.num_planned += 1
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _hash(self, layouts: Sequence[WeightLayout]) -> str:
        """Hash of layouts; if they are the same objects as last time, boxes are not read again."""
        for known, digest in self._hashed:
            if known is layouts:
                return digest
        digest = layout_hash(layouts)
        if isinstance(layouts, tuple):
            self._hashed = [*self._hashed[-3:], (layouts, digest)]
        return digest


def layout_hash(layouts: Sequence[WeightLayout]) -> str:
    """Hash of all fields of layouts, 128 bits in hexadecimal; equal for equal layouts in all processes."""
    digest = hashlib.blake2b(digest_size=16)
    for layout in layouts:
        names = {meta.name: at for at, meta in enumerate(layout.tensors)}
        head = (
            layout.rank,
            layout.node,
            layout.device,
            layout.process,
            layout.worker,
            layout.host,
            layout.is_apart,
            [(meta.name, meta.shape, meta.dtype, meta.scales) for meta in layout.tensors],
            sorted(layout.tied.items()),
            len(layout.boxes),
            [name for name, _ in layout.boxes if name not in names],
        )
        digest.update(repr(head).encode())
        numbers: list[int] = []
        for name, box in layout.boxes:
            numbers += (names.get(name, -1), len(box.size), *box.offset, *box.size)
        digest.update(np.array(numbers, np.int64).tobytes())
    return digest.hexdigest()
