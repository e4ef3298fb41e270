"""Interface to vLLM's engines, in this process or another.

All code that depends on vLLM's version is in the modules next to this one: `environment` and `arguments` (start),
`requests` (samples), `in_process` and `asynchronous` (its two engines), and, in its workers, `worker`, `loader`,
`transfer` and `sampler`. Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from safetensors.torch import save
from torch import Tensor

from rlsdk.interfaces import (
    AdapterSpec,
    DeadlineError,
    Delivery,
    RankContext,
    RolloutSpec,
    WeightShard,
    WorkerReceipt,
)
from rlsdk.kit.weights import delivery, weight_updates
from rlsdk.kit.weights.staging import batches
from rlsdk.kit.weights.weight_updates import Fingerprints
from rlsdk_vllm.environment import has_copies_apart, has_workers_apart
from rlsdk_vllm.requests import Progress
from rlsdk_vllm.samples import Sample

STAGING_BYTES = 64 << 20
"""Size of the staging block for weights that are sent to workers in other processes."""


class VllmEngine(ABC):
    """The operations of vLLM's engines that `VllmRolloutEngine` uses. An engine samples its requests until it is
    paused; `paused` is the last requested state."""

    vocabulary: int
    turn_s: float
    """Seconds that callers wait between two steps."""
    is_spread: bool
    """Whether its workers are separate processes."""

    def __init__(self, ctx: RankContext, spec: RolloutSpec) -> None:
        self.paused = False
        self.spans_nodes = has_workers_apart(ctx, spec) or has_copies_apart(ctx, spec)
        """Whether some of its workers are on other nodes, which cannot map this node's memory."""

    @abstractmethod
    def add(self, sample: Sample) -> None:
        """Adds a sample, which runs in the next steps.

        Raises:
            ConfigError: vLLM refuses it.
        """

    @abstractmethod
    def step(self) -> list[Progress]:
        """Returns new tokens since the last call. While paused, no sample gets tokens."""

    def kv_used(self) -> float | None:
        """Share of used KV cache blocks; None: the scheduler is in another process."""
        return None

    @abstractmethod
    def abort(self, keys: Sequence[str]) -> None:
        """Aborts samples."""

    def pause(self) -> None:
        """Pauses sampling from the next pass on."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    @abstractmethod
    def drop_caches(self) -> None:
        """Drops the KV cache; running samples are recomputed from their tokens.

        Raises:
            RuntimeError: some blocks are still in use.
        """

    @abstractmethod
    def sleep(self, level: int) -> None: ...

    @abstractmethod
    def wake(self, parts: Sequence[str]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def call_workers(self, method: str, *args: Any, moving: bool = False) -> list[Any]:
        """Calls a method of vLLM's workers, or of `WorkerExtension`, on every worker.

        Args:
            method: its name.
            args: its arguments.
            moving: the call transfers weights. Workers enforce its deadline themselves while weights arrive.

        Raises:
            DeadlineError: a worker did not answer in time.
        """

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Prepares the workers; returns reasons why this model, with canonical tensors of these shapes, cannot be
        served."""
        found = sorted({fault for faults in self.call_workers("rlsdk_prepare") for fault in faults})
        cut = weight_updates.find_unserved(shapes, self.call_workers("rlsdk_boxes"))
        return found + [f"vLLM's model does not hold all of canonical tensor {name!r}" for name in cut]

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Writes weights into the memory that the workers compute with."""
        with self._update():
            if not self.is_spread:
                self.call_workers("update_weights", {"shards": shards})
            for block in batches(shards, STAGING_BYTES) if self.is_spread else ():
                where = {"values": block.values()} if self.spans_nodes else {"block": block.name}
                self.call_workers("update_weights", {**where, "entries": block.entries})

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Context of an update: inside, vLLM's workers receive weights (`rlsdk_vllm.transfer`); after it, they serve
        these weights."""
        self.call_workers("start_weight_update")
        try:
            yield
            self.call_workers("finish_weight_update")
        except DeadlineError:
            raise
        except BaseException:
            self.call_workers("rlsdk_leave_update")
            raise

    def describe_workers(self) -> list[dict[str, Any]]:
        """Describes the workers: their boxes and locations."""
        return list(self.call_workers("rlsdk_describe"))

    def receive(self, deliveries: Sequence[Delivery], version: int) -> tuple[WorkerReceipt, ...]:
        """Lets every worker receive its part."""
        with self._update():
            self.call_workers("update_weights", {"deliveries": delivery.encode_deliveries(deliveries)}, moving=True)
            return delivery.worker_receipts(self.call_workers("rlsdk_taken"), version)

    def fingerprints(self) -> list[Fingerprints]:
        """Fingerprints by worker."""
        return list(self.call_workers("rlsdk_fingerprints"))

    def unbound(self, modules: Sequence[str]) -> list[str]:
        """Canonical modules that no worker would compute an adapter of."""
        found = [set(names) for names in self.call_workers("rlsdk_unbound", list(modules))]
        return sorted(set.intersection(*found))

    def put_adapter(
        self, number: int, tensors: Mapping[str, Tensor], spec: AdapterSpec, keep: Sequence[int]
    ) -> list[Fingerprints]:
        """Puts an adapter beside the weights, under a new id; fingerprints by worker, see `low_rank.put`."""
        said = {"rank": spec.rank, "alpha": spec.alpha, "rslora": spec.scaling == "rslora"}
        return list(self.call_workers("rlsdk_put_adapter", number, save(dict(tensors)), said, list(keep)))

    def checksum(self) -> str | None:
        """A checksum over vLLM's own checksums of all parameters of all workers; None: this version computes none."""
        found = self.call_workers("rlsdk_checksums")
        if any(one is None for one in found):
            return None
        lines = sorted(f"{name} {digest}\n" for one in found for name, digest in one.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def serve(self, version: int) -> None:
        """Sets the version of all tokens sampled from now on; vLLM's outputs and endpoints report it too."""
        self.call_workers("rlsdk_serve", version)
        self.report_version(str(version))

    @abstractmethod
    def report_version(self, version: str) -> None:
        """Sets the weight version that vLLM reports (from 0.32 on)."""

    def is_spoiled(self) -> bool:
        """Whether the KV cache may contain NaN. The workers know: tokens that they sampled need not get here."""
        return any(self.call_workers("rlsdk_is_spoiled"))

    def clear_caches(self) -> None:
        """Overwrites the KV cache with zeros."""
        self.call_workers("rlsdk_clear_caches")

    def release(self, parts: Sequence[str]) -> None:
        self.call_workers("rlsdk_release", list(parts))

    def restore(self, parts: Sequence[str]) -> None:
        self.call_workers("rlsdk_restore", list(parts))
