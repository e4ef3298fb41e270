"""Weight updates, implemented as a vLLM weight transfer engine.

In vLLM, workers open a session for each update (`start_weight_update`, `update_weights`, `finish_weight_update`).
During the session, layers that process their weights have access to the configuration; after it, vLLM drops state that
depended on the old weights. vLLM's own transfer engines receive whole tensors by name from one sender. This one follows
an rlsdk plan: each worker pulls its own boxes from their sources into the memory that it serves from.

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlsdk.interfaces import WeightShard
from rlsdk.kit.weights import delivery
from rlsdk.kit.weights.staging import BlockName, attached, copied
from rlsdk.kit.weights.weight_updates import write_shard
from rlsdk_vllm import loader

NAME = "rlsdk"
"""Name of this engine in vLLM's registry and `weight_transfer_config`."""


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """No setup before the first update: every delivery contains its own address."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A part of an update. Only the fields of one way to transfer weights are set."""

    shards: Iterable[WeightShard] | None = None
    """Weights in this process."""
    block: BlockName | None = None
    """Weights in memory that another process filled; `entries` describes them."""
    values: bytes | None = None
    """As `block`, for a worker on another node: the bytes are sent with the call."""
    entries: Sequence[Sequence[Any]] = ()
    deliveries: Sequence[Sequence[Any]] | None = None
    """Deliveries to all workers: each finds its own and pulls the weights from their source."""


class PlanTransfer(WeightTransferEngine):  # type: ignore[misc]
    """One per worker, created by vLLM once the model is built."""

    init_info_cls = NoInfo
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.name = uuid.uuid4().hex
        """Unique name of this worker."""
        self.pieces = loader.served_pieces(model)
        self.taken: Mapping[str, Any] | None = None
        """Result of the last deliveries, for `rlsdk.kit.weights.delivery.worker_receipts`."""

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """No-op: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Resets the result. Weights are written in place, so that no layer has to be prepared for reloading."""
        self.taken = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own method, which synchronizes with an accelerator even on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Writes the part of an update that this worker holds; ignores the rest."""
        if update_info.shards is not None:
            self._write(update_info.shards)
        if update_info.block is not None:
            with attached(update_info.block, update_info.entries) as shards:
                self._write(shards)
        if update_info.values is not None:
            self._write(copied(update_info.values, update_info.entries))
        if update_info.deliveries is not None:
            self.taken = delivery.receive_shards(self.name, update_info.deliveries, self.pieces)

    def finish_weight_update(self) -> None:
        """Recomputes the tensors that attention derives from weights, once all weights have arrived."""
        loader.rebuild(self.model, self.model_config.dtype)

    def shutdown(self) -> None:
        """Drops the views of weights, whose memory would otherwise stay allocated."""
        self.pieces = {}
        if hasattr(self.model, loader.PIECES):
            delattr(self.model, loader.PIECES)

    def _write(self, shards: Iterable[WeightShard]) -> None:
        for shard in shards:
            write_shard(self.pieces[shard.name], shard)


WeightTransferEngineFactory.register_engine(NAME, PlanTransfer)
