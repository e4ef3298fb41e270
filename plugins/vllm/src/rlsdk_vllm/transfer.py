"""Updates of weights as one of vLLM's own weight transfer engines.

In vLLM, workers keep a session for each update (`start_weight_update`, `update_weights`, `finish_weight_update`): in it
its configuration is at hand for layers that process their weights, and after it state that depended on the old ones
is dropped. The engines that come with vLLM take whole tensors by name, from one sender. This one takes what a plan of
rlsdk's brings: each worker its own boxes, pulled from where they are, into the memory that serves.

Tested window: 0.31 and 0.32 (their CPU builds).
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
from rlsdk.kit import delivery
from rlsdk.kit.staging import BlockName, attached, copied
from rlsdk.kit.weight_updates import write_shard
from rlsdk_vllm import loader

NAME = "rlsdk"
"""Of this engine, in vLLM's registry and `weight_transfer_config`."""


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to agree on before the first update: a delivery says where it is."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A part of an update, in one of the ways in which weights reach a worker."""

    shards: Iterable[WeightShard] | None = None
    """In this process."""
    block: BlockName | None = None
    """In memory that another process filled, with `entries`."""
    values: bytes | None = None
    """As `block`, on another node: they come with the call."""
    entries: Sequence[Sequence[Any]] = ()
    deliveries: Sequence[Sequence[Any]] | None = None
    """What workers take from where it is; each finds its own among them."""


class PlanTransfer(WeightTransferEngine):  # type: ignore[misc]
    """One per worker, made by vLLM when the model is there."""

    init_info_cls = NoInfo
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.name = uuid.uuid4().hex
        """Of this worker."""
        self.pieces = loader.served_pieces(model)
        self.taken: Mapping[str, Any] | None = None
        """What came of the last deliveries: for `rlsdk.kit.delivery.worker_receipts`."""

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing is to be opened."""

    def start_weight_update(self) -> None:
        """Nothing is to be readied: weights are written where they serve, and not loaded again layer by layer."""
        self.taken = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, which waits for an accelerator, also where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """What this worker does not hold of an update passes by."""
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
        """Makes what attention derives from weights, once all of them have come."""
        loader.rebuild(self.model, self.model_config.dtype)

    def shutdown(self) -> None:
        """Nothing is held."""

    def _write(self, shards: Iterable[WeightShard]) -> None:
        for shard in shards:
            write_shard(self.pieces[shard.name], shard)


WeightTransferEngineFactory.register_engine(NAME, PlanTransfer)
