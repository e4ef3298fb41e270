"""What this plugin asks of an engine of vLLM's, in whichever process that computes.

All that depends on vLLM's version is in the modules beside this one: `environment` and `arguments` (how it is started),
`requests` (samples), `in_process` and `asynchronous` (its two engines), and, in its workers, `worker`, `loader`,
`transfer` and `sampler`. Tested window: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlsdk.interfaces import DeadlineError, Delivery, RankContext, RolloutSpec, WeightShard, WorkerReceipt
from rlsdk.kit import delivery, weight_updates
from rlsdk.kit.staging import batches
from rlsdk.kit.weight_updates import Fingerprints
from rlsdk_vllm.environment import has_copies_apart, has_workers_apart
from rlsdk_vllm.requests import Progress
from rlsdk_vllm.samples import Sample

STAGING_BYTES = 64 << 20
"""Most weights on their way to workers in other processes."""


class VllmEngine(ABC):
    """What `VllmRolloutEngine` asks of an engine of vLLM's, in whichever process that computes. It samples whatever it
    was given until it is paused; `paused` says what was asked for last."""

    vocabulary: int
    turn_s: float
    """How long callers leave between two steps."""
    is_spread: bool
    """Its workers are processes of their own."""

    def __init__(self, ctx: RankContext, spec: RolloutSpec) -> None:
        self.paused = False
        self.spans_nodes = has_workers_apart(ctx, spec) or has_copies_apart(ctx, spec)
        """Some of its workers are on other nodes, where no memory of this one can be mapped."""

    @abstractmethod
    def add(self, sample: Sample) -> None:
        """Takes a sample in; it runs with the next steps.

        Raises:
            ConfigError: vLLM refuses it.
        """

    @abstractmethod
    def step(self) -> list[Progress]:
        """What there is now that was not there the last time. Paused, no sample gets any more tokens."""

    def kv_used(self) -> float | None:
        """Share of the blocks for keys and values that samples hold; None: the scheduler is in another process."""
        return None

    @abstractmethod
    def abort(self, keys: Sequence[str]) -> None:
        """Forgets samples."""

    def pause(self) -> None:
        """Samples no more from the next pass on."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    @abstractmethod
    def drop_caches(self) -> None:
        """Forgets all keys and values; samples that run are computed again from their tokens.

        Raises:
            RuntimeError: something still holds on to them.
        """

    @abstractmethod
    def sleep(self, level: int) -> None: ...

    @abstractmethod
    def wake(self, parts: Sequence[str]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def call_workers(self, method: str, *args: Any, moving: bool = False) -> list[Any]:
        """Calls a method of vLLM's workers, or of `WorkerExtension`, in every one of them.

        Args:
            method: its name.
            args: of the call.
            moving: it takes as long as weights keep coming, which workers see to themselves.

        Raises:
            DeadlineError: a worker did not answer in time.
        """

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Readies the workers; returns what speaks against serving this model, of canonical tensors of these shapes."""
        found = sorted({fault for faults in self.call_workers("rlsdk_prepare") for fault in faults})
        cut = weight_updates.find_unserved(shapes, self.call_workers("rlsdk_boxes"))
        return found + [f"vLLM's model has no place for all of canonical tensor {name!r}" for name in cut]

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Brings weights to where the workers compute from."""
        with self._update():
            if not self.is_spread:
                self.call_workers("update_weights", {"shards": shards})
            for block in batches(shards, STAGING_BYTES) if self.is_spread else ():
                where = {"values": block.values()} if self.spans_nodes else {"block": block.name}
                self.call_workers("update_weights", {**where, "entries": block.entries})

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Inside, vLLM's workers take weights (`rlsdk_vllm.transfer`); after it they serve them."""
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
        """Of each worker, what it holds and where it is."""
        return list(self.call_workers("rlsdk_describe"))

    def receive(self, deliveries: Sequence[Delivery], version: int) -> tuple[WorkerReceipt, ...]:
        """Has every worker take its part."""
        with self._update():
            self.call_workers("update_weights", {"deliveries": delivery.encode_deliveries(deliveries)}, moving=True)
            return delivery.worker_receipts(self.call_workers("rlsdk_taken"), version)

    def fingerprints(self) -> list[Fingerprints]:
        """By worker."""
        return list(self.call_workers("rlsdk_fingerprints"))

    def checksum(self) -> str | None:
        """One of vLLM's own checksums of all parameters of all workers; None: this version has none."""
        found = self.call_workers("rlsdk_checksums")
        if any(one is None for one in found):
            return None
        lines = sorted(f"{name} {digest}\n" for one in found for name, digest in one.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def serve(self, version: int) -> None:
        """Tokens that are sampled from now on are of this version, also to vLLM, whose outputs and endpoints say it."""
        self.call_workers("rlsdk_serve", version)
        self.tell_version(str(version))

    @abstractmethod
    def tell_version(self, version: str) -> None:
        """Where vLLM keeps a version of its weights (from 0.32 on), it is this one."""

    def clear_caches(self) -> None:
        """Overwrites all keys and values with zeros."""
        self.call_workers("rlsdk_clear_caches")

    def park(self, parts: Sequence[str]) -> None:
        self.call_workers("rlsdk_park", list(parts))

    def restore(self, parts: Sequence[str]) -> None:
        self.call_workers("rlsdk_restore", list(parts))
