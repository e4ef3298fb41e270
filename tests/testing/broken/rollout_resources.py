"""Rollout engines that leak memory, threads, files or processes."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from broken.defect import defect
from broken.rollout_base import Rewritten
from rlsdk.interfaces import GenerationRequest, SyncReceipt, WeightShard
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine

MIB = 2**20


@defect({"close": "share of the weights' memory"})
class KeepsModels(TransformersRolloutEngine):
    """A table of the module keeps the model of every engine."""

    MODELS: ClassVar[list[Any]] = []

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.MODELS.append(self.model)


@defect({"memory": "MiB that 12 calls added"})
class Leaks(Rewritten):
    """Every call leaks eight MiB."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.kept: list[bytearray] = []

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.kept.append(bytearray(b"x" * 8 * MIB))
        return request


@defect({"replicas": "open files that it left"})
class FileForEngine(TransformersRolloutEngine):
    """An engine leaks an open file."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.file = os.open(os.devnull, os.O_RDONLY)


@defect({"replicas": "threads that it left"})
class ThreadForEngine(TransformersRolloutEngine):
    """A thread of an engine outlives it."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        threading.Thread(target=threading.Event().wait, args=(120,), daemon=True).start()


@defect({"memory.updates": "MiB that"})
class KeepsWeights(TransformersRolloutEngine):
    """The weights of every update are kept in memory."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.kept = getattr(self, "kept", [])
        self.kept.append([p.clone() for p in self.parameters.values()] * 1 + [torch.ones(2**21)])
        return receipt


@defect({"close": "temporary folder"})
class TemporaryFolderStays(TransformersRolloutEngine):
    """Every engine leaves a folder in the machine's temporary folder."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        folder = Path(tempfile.mkdtemp(prefix="kernels-"))
        (folder / "index.json").write_text("{}")


@defect({"handles": "threads that"})
class ThreadForSleep(TransformersRolloutEngine):
    """Every sleep leaks a waiting thread."""

    def sleep(self, level: int = 1) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        super().sleep(level)


@defect({"handles": "open files that"})
class FileForAbort(TransformersRolloutEngine):
    """Every abort leaks an open file."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        os.open(os.devnull, os.O_RDONLY)
        super().abort(request_ids)


@defect({"close.asleep": "shared memory"})
class FileOfSleep(TransformersRolloutEngine):
    """Level 1 keeps the weights in a file in shared memory, which `wake` removes and `close` does not."""

    file: Path | None = None

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        if self.file is None:
            self.file = Path(f"/dev/shm/broken-{os.getpid()}-{id(self)}")
            self.file.write_bytes(b"weights")

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" in parts and self.file is not None:
            self.file.unlink()
            self.file = None
