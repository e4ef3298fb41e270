"""What this plugin adds to vLLM's workers: their weights and memory, reached by name from the engine's process."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from rlsdk.interfaces import WeightShard
from rlsdk.kit import delivery, intake
from rlsdk.kit.intake import Boxes, Fingerprints, write_shard
from rlsdk.kit.parked import Parked
from rlsdk.kit.staging import BlockName, attached, copied
from rlsdk_vllm import loader, nameless
from rlsdk_vllm.orphans import watch_parent
from rlsdk_vllm.sampler import ContractSampler

nameless.install()


class WorkerExtension:
    """Mixed into the worker class by vLLM. Importing this module registers the model loader in a worker's process, and
    does so before the worker's device and groups are made."""

    model_runner: Any

    def rlsdk_prepare(self) -> list[str]:
        """Installs the sampler, and what ends this worker with its engine; returns why the weights could not be
        replaced and proven."""
        watch_parent()
        self._rlsdk_pieces = loader.served_pieces(self.model_runner.get_model())
        self._rlsdk_name = uuid.uuid4().hex
        self._rlsdk_parked = {"weights": Parked(), "kv_cache": Parked()}
        self.model_runner.sampler = ContractSampler(self.model_runner)
        return loader.faults(self.model_runner.get_model())

    def rlsdk_write(self, shards: Iterable[WeightShard]) -> None:
        """Takes shards one at a time; what this worker does not hold of them passes by."""
        for shard in shards:
            write_shard(self._rlsdk_pieces[shard.name], shard)

    def rlsdk_take(self, block: BlockName, entries: Sequence[Sequence[Any]]) -> None:
        """As `rlsdk_write`, out of memory that another process filled."""
        with attached(block, entries) as shards:
            self.rlsdk_write(shards)

    def rlsdk_take_copy(self, values: bytes, entries: Sequence[Sequence[Any]]) -> None:
        """As `rlsdk_take`, on another node: the values come with the call."""
        self.rlsdk_write(copied(values, entries))

    def rlsdk_describe(self) -> dict[str, Any]:
        """Who this worker is, and what it holds."""
        return delivery.described(self._rlsdk_name, os.getpid(), self._rlsdk_pieces)

    def rlsdk_receive(self, deliveries: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Takes what this worker holds of an update, from where it is."""
        return delivery.taken(self._rlsdk_name, deliveries, self._rlsdk_pieces)

    def rlsdk_rebuild(self) -> None:
        """Makes what attention derives from weights, once all of them have come."""
        loader.rebuild(self.model_runner.get_model(), self.model_runner.model_config.dtype)

    def rlsdk_boxes(self) -> Boxes:
        """All that this worker serves."""
        return intake.boxes(self._rlsdk_pieces)

    def rlsdk_fingerprints(self) -> Fingerprints:
        """Of each box that this worker serves, over the memory that serves it; what is derived from weights is of
        these."""
        loader.check(self.model_runner.get_model(), self.model_runner.model_config.dtype)
        return intake.fingerprints(self._rlsdk_pieces)

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

    def rlsdk_park(self, parts: Sequence[str]) -> None:
        """Gives memory back; for CPUs."""
        for part in parts:
            self._rlsdk_parked[part].empty(self._rlsdk_tensors(part))

    def rlsdk_restore(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._rlsdk_parked[part].restore()

    def _rlsdk_tensors(self, part: str) -> list[Tensor]:
        if part == "weights":
            return [piece.memory for parts in self._rlsdk_pieces.values() for piece in parts]
        return [tensor for tensor in self.model_runner.kv_caches if isinstance(tensor, Tensor)]
