"""The two ends of a weight transfer inside workers: of all weights of an engine, and of each part of them.

A host of an engine is an end of all its weights, and has one more end for each part that is synced alone. A part's
methods are those of the whole, called by `call_part` and `call_part_beside`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlsdk.cluster import Join, Split, dispatch
from rlsdk.interfaces import Bucket, QuantizedPiece, Relay, SyncReceipt, Transfer, WeightLayout, WeightPart
from rlsdk.sharding import WeightSource, WeightTarget

if TYPE_CHECKING:
    from rlsdk.interfaces import Peer


class WeightEnd:
    """An end whose parts can be called, too."""

    parts: Mapping[WeightPart, Any]

    @dispatch(split=Split.ALL, join=Join.LIST)
    def call_part(self, part: WeightPart, method: str, *args: Any) -> Any:
        """Calls a method of one part, on the engine's thread."""
        return getattr(self.parts[part], method)(*args)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def call_part_beside(self, part: WeightPart, method: str, *args: Any) -> Any:
        """Calls a method of one part while the engine works."""
        return getattr(self.parts[part], method)(*args)


class SourceHost(WeightEnd):
    """Satisfies `rlsdk.interfaces.WeightSourceHost`."""

    parts: Mapping[WeightPart, SourceHost]

    def __init__(self, source: WeightSource, parts: Mapping[WeightPart, SourceHost] | None = None) -> None:
        self.source, self.parts = source, parts or {}

    @dispatch(split=Split.ALL, join=Join.LIST)
    def weight_layout(self) -> WeightLayout:
        return self.source.layout()

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        return self.source.export(buckets, sync)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> dict[str, int]:
        return self.source.fingerprints(transfers)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def weight_block_maxima(self, pieces: Sequence[QuantizedPiece]) -> list[NDArray[np.float32]]:
        return self.source.block_maxima(pieces)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def weight_block_fingerprints(
        self, pieces: Sequence[QuantizedPiece], maxima: Sequence[NDArray[np.float32]]
    ) -> dict[str, int]:
        return self.source.block_fingerprints(pieces, maxima)


class TargetHost(WeightEnd):
    """Satisfies `rlsdk.interfaces.WeightTargetHost`."""

    parts: Mapping[WeightPart, TargetHost]

    def __init__(
        self, target: WeightTarget, parts: Mapping[WeightPart, TargetHost] | None = None, *, beside: bool = False
    ) -> None:
        """`beside`: the engine decodes while weights arrive; otherwise an update takes its thread from the first to the
        last byte."""
        self.target, self.parts, self.beside = target, parts or {}, beside

    @dispatch(split=Split.ALL, join=Join.LIST)
    def target_layouts(self) -> Sequence[WeightLayout]:
        return self.target.layouts()

    @dispatch(split=Split.ALL, join=Join.LIST)
    def pull_weights(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Peer],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        receipt = self.target.pull(buckets, peers, version, timeout_s, relay)
        return receipt if self.beside else replace(receipt, pause_s=receipt.seconds)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def pass_on_weights(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        return self.target.pass_on(buckets, sync, timeout_s)
