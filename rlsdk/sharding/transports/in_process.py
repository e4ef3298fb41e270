"""Weights within one process: the target gets views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import WeightLayout
from rlsdk.sharding.transports.transport import Outgoing, Transport
from rlsdk.sharding.transports.wire import Metas


class InProcessTransport(Transport):
    """Both ends in one process: the target gets views of the source's own memory, converted only if necessary."""

    name = "in_process"
    stays_on_device = True
    call_bytes = None

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.process == target.process

    @classmethod
    def reaches_workers(cls) -> bool:
        return False

    def export(self, buckets: Sequence[Outgoing]) -> list[Mapping[str, Any]]:
        return [
            {"tensors": [s.tensor.detach().to(getattr(torch, d)) for s, d in zip(b.take(), b.dtypes, strict=True)]}
            for b in buckets
        ]

    def fetch(self, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
        return iter(handle["tensors"])
