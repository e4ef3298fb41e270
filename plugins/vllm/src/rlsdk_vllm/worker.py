"""Extension of vLLM's workers: methods through which the engine's process accesses their weights and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rlsdk.kit.memory.offload import ReleasedMemory
from rlsdk.kit.weights import delivery, weight_updates
from rlsdk.kit.weights.weight_tracing import Piece
from rlsdk.kit.weights.weight_updates import Boxes, Fingerprints
from rlsdk_vllm import loader, low_rank, transfer, unnamed_memory  # noqa: F401 - importing `transfer` registers it
from rlsdk_vllm.child_lifetime import watch_parent
from rlsdk_vllm.sampler import ContractSampler

unnamed_memory.install()


class WorkerExtension:
    """vLLM mixes it into its worker class. Importing this module registers the model loader and the weight transfer in
    a worker's process, before the worker's device and groups are created."""

    model_runner: Any
    weight_transfer_engine: Any
    """The `PlanTransfer`; vLLM sets this attribute."""
    finish_weight_update: Any
    _weight_update_active: bool

    @property
    def _rlsdk_pieces(self) -> dict[str, list[Piece]]:
        """Canonical tensor -> pieces that this worker serves."""
        pieces: dict[str, list[Piece]] = self.weight_transfer_engine.pieces
        return pieces

    def rlsdk_prepare(self) -> list[str]:
        """Installs the sampler, and makes this worker end with its engine; returns reasons why weights cannot be
        replaced and verified."""
        watch_parent()
        self._rlsdk_released = {"weights": ReleasedMemory(), "kv_cache": ReleasedMemory()}
        self.model_runner.sampler = ContractSampler(self.model_runner)
        return loader.faults(self.model_runner.get_model())

    def rlsdk_describe(self) -> dict[str, Any]:
        """Description of this worker and its boxes."""
        return delivery.describe_worker(self.weight_transfer_engine.name, os.getpid(), self._rlsdk_pieces)

    def rlsdk_taken(self) -> dict[str, Any]:
        """Result of the deliveries of the last update."""
        return dict(self.weight_transfer_engine.taken)

    def rlsdk_leave_update(self) -> None:
        """Ends a failed update. vLLM ends an update whose weights did not arrive, but not one whose finish failed:
        without this call no further update could begin."""
        with suppress(Exception):
            self.finish_weight_update()
        self._weight_update_active = False

    def rlsdk_boxes(self) -> Boxes:
        """The boxes that this worker serves."""
        return weight_updates.served_boxes(self._rlsdk_pieces)

    def rlsdk_fingerprints(self) -> Fingerprints:
        """Fingerprints of the boxes that this worker serves, over the memory that it serves from; checks derived
        tensors."""
        loader.check(self.model_runner.get_model(), self.model_runner.model_config.dtype)
        return weight_updates.served_fingerprints(self._rlsdk_pieces)

    def rlsdk_checksums(self) -> dict[str, str] | None:
        """vLLM's own checksums of all parameters; None: this version computes none."""
        compute = getattr(self, "compute_weight_checksums", None)
        return None if compute is None else dict(compute())

    def rlsdk_unbound(self, modules: Sequence[str]) -> list[str]:
        """Canonical modules that no layer of this worker would compute an adapter of."""
        return low_rank.unbound(self.model_runner.lora_manager._adapter_manager, modules)

    def rlsdk_put_adapter(self, number: int, values: bytes, spec: dict[str, Any], keep: Sequence[int]) -> Fingerprints:
        """Puts an adapter beside the weights; see `low_rank.put`."""
        with torch.inference_mode(False):
            return low_rank.put(self.model_runner.lora_manager._adapter_manager, number, values, spec, keep)

    def rlsdk_serve(self, version: int) -> None:
        """Sets the version of tokens sampled from now on."""
        self.model_runner.sampler.version = version

    def rlsdk_is_spoiled(self) -> bool:
        """Whether the KV cache may contain NaN, because a token had a log-prob that is not finite."""
        return bool(self.model_runner.sampler.spoiled)

    def rlsdk_clear_caches(self) -> None:
        """Overwrites the KV cache with zeros."""
        for tensor in self._rlsdk_tensors("kv_cache"):
            tensor.zero_()
        self.model_runner.sampler.spoiled = False

    def rlsdk_release(self, parts: Sequence[str]) -> None:
        """Frees memory on a CPU."""
        for part in parts:
            self._rlsdk_released[part].release(self._rlsdk_tensors(part))

    def rlsdk_restore(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._rlsdk_released[part].restore()

    def _rlsdk_tensors(self, part: str) -> list[Tensor]:
        if part == "weights":
            return [piece.memory for parts in self._rlsdk_pieces.values() for piece in parts]
        return [tensor for tensor in self.model_runner.kv_caches if isinstance(tensor, Tensor)]
