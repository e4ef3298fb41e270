"""What this plugin adds to vLLM's workers: their weights and memory, reached by name from the engine's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from rlsdk.kit import delivery, weight_updates
from rlsdk.kit.offload import ReleasedMemory
from rlsdk.kit.weight_tracing import Piece
from rlsdk.kit.weight_updates import Boxes, Fingerprints
from rlsdk_vllm import loader, transfer, unnamed_memory  # noqa: F401 - importing `transfer` registers it
from rlsdk_vllm.child_lifetime import watch_parent
from rlsdk_vllm.sampler import ContractSampler

unnamed_memory.install()


class WorkerExtension:
    """Mixed into the worker class by vLLM. Importing this module registers the model loader and the weight transfer in
    a worker's process, and does so before the worker's device and groups are made."""

    model_runner: Any
    weight_transfer_engine: Any
    """vLLM's name for it: a `PlanTransfer`."""
    finish_weight_update: Any
    _weight_update_active: bool

    @property
    def _rlsdk_pieces(self) -> dict[str, list[Piece]]:
        """Of each canonical tensor, what this worker serves."""
        pieces: dict[str, list[Piece]] = self.weight_transfer_engine.pieces
        return pieces

    def rlsdk_prepare(self) -> list[str]:
        """Installs the sampler, and what ends this worker with its engine; returns why the weights could not be
        replaced and proven."""
        watch_parent()
        self._rlsdk_released = {"weights": ReleasedMemory(), "kv_cache": ReleasedMemory()}
        self.model_runner.sampler = ContractSampler(self.model_runner)
        return loader.faults(self.model_runner.get_model())

    def rlsdk_describe(self) -> dict[str, Any]:
        """Who this worker is, and what it holds."""
        return delivery.describe_worker(self.weight_transfer_engine.name, os.getpid(), self._rlsdk_pieces)

    def rlsdk_taken(self) -> dict[str, Any]:
        """What came of the deliveries of the last update."""
        return dict(self.weight_transfer_engine.taken)

    def rlsdk_leave_update(self) -> None:
        """Ends an update that failed. vLLM ends it where weights failed to come, and leaves it open where its end
        failed: then the next one could not begin."""
        with suppress(Exception):
            self.finish_weight_update()
        self._weight_update_active = False

    def rlsdk_boxes(self) -> Boxes:
        """All that this worker serves."""
        return weight_updates.served_boxes(self._rlsdk_pieces)

    def rlsdk_fingerprints(self) -> Fingerprints:
        """Of each box that this worker serves, over the memory that serves it; what is derived from weights is of
        these."""
        loader.check(self.model_runner.get_model(), self.model_runner.model_config.dtype)
        return weight_updates.served_fingerprints(self._rlsdk_pieces)

    def rlsdk_checksums(self) -> dict[str, str] | None:
        """vLLM's own, of each parameter; None: this version has none."""
        compute = getattr(self, "compute_weight_checksums", None)
        return None if compute is None else dict(compute())

    def rlsdk_serve(self, version: int) -> None:
        """Tokens that are sampled from now on are of this version."""
        self.model_runner.sampler.version = version

    def rlsdk_clear_caches(self) -> None:
        """Overwrites all keys and values with zeros."""
        for tensor in self._rlsdk_tensors("kv_cache"):
            tensor.zero_()

    def rlsdk_release(self, parts: Sequence[str]) -> None:
        """Gives memory back; for CPUs."""
        for part in parts:
            self._rlsdk_released[part].release(self._rlsdk_tensors(part))

    def rlsdk_restore(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._rlsdk_released[part].restore()

    def _rlsdk_tensors(self, part: str) -> list[Tensor]:
        if part == "weights":
            return [piece.memory for parts in self._rlsdk_pieces.values() for piece in parts]
        return [tensor for tensor in self.model_runner.kv_caches if isinstance(tensor, Tensor)]
