"""Rollout engines that leak memory, threads, files or processes."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import torch

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine

MIB = 2**20


class KeepsModels(TransformersRolloutEngine):
    """A table of the module keeps the model of every engine."""

    MODELS: ClassVar[list[Any]] = []

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.MODELS.append(self.model)


class Leaks(Rewritten):
    """Every call leaks eight MiB."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.kept: list[bytearray] = []

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.kept.append(bytearray(b"x" * 8 * MIB))
        return request


class LeavesProcess(TransformersRolloutEngine):
    """A helper process of each engine outlives it."""

    left: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def close(self) -> None:
        if hasattr(self, "model"):
            self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        super().close()


class OneModelForAll(TransformersRolloutEngine):
    """Engines of a process share one model."""

    living: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        for other in self.living[:1]:
            for name, parameter in self.parameters.items():
                parameter.data = other.parameters[name].data
        self.living.append(self)

    def close(self) -> None:
        if self in self.living:
            self.living.remove(self)
        super().close()


class ThreadForUpdate(TransformersRolloutEngine):
    """Every update leaks a waiting thread."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.stop = getattr(self, "stop", None) or threading.Event()
        threading.Thread(target=self.stop.wait, args=(600,), daemon=True).start()
        return super().update_weights(shards, version)

    def close(self) -> None:
        if hasattr(self, "stop"):
            self.stop.set()
        super().close()


class FileForCall(Rewritten):
    """Every call leaks an open file."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.files: list[Any] = []

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115 - that is the defect
        return request

    def close(self) -> None:
        for file in getattr(self, "files", []):
            file.close()
        super().close()


class FileForEngine(TransformersRolloutEngine):
    """An engine leaks an open file."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.file = os.open(os.devnull, os.O_RDONLY)


class ThreadForEngine(TransformersRolloutEngine):
    """A thread of an engine outlives it."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        threading.Thread(target=threading.Event().wait, args=(120,), daemon=True).start()


class KeepsWeights(TransformersRolloutEngine):
    """The weights of every update are kept in memory."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.kept = getattr(self, "kept", [])
        self.kept.append([p.clone() for p in self.parameters.values()] * 1 + [torch.ones(2**21)])
        return receipt


class TemporaryFolderStays(TransformersRolloutEngine):
    """Every engine leaves a folder in the machine's temporary folder."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        folder = Path(tempfile.mkdtemp(prefix="kernels-"))
        (folder / "index.json").write_text("{}")


class FailedUpdateStaysOpen(Patched):
    """An update that raises leaves its staging file open."""

    def update_weights(self, shards, version):
        handle = os.memfd_create("staging")
        receipt = super().update_weights(shards, version)
        os.close(handle)
        return receipt


class ThreadForSleep(TransformersRolloutEngine):
    """Every sleep leaks a waiting thread."""

    def sleep(self, level: int = 1) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        super().sleep(level)


class FileForAbort(TransformersRolloutEngine):
    """Every abort leaks an open file."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        os.open(os.devnull, os.O_RDONLY)
        super().abort(request_ids)


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


class RefusedStartLeavesFile(TransformersRolloutEngine):
    """A file is made before the specification is checked; `close` removes it only if the engine has started."""

    slots: Path | None = None
    started = False

    def initialize(self, ctx: Any, spec: Any) -> None:
        handle, name = tempfile.mkstemp(prefix="slots-", dir=ctx.scratch_dir)
        os.close(handle)
        self.slots = Path(name)
        super().initialize(ctx, spec)
        self.started = True

    def close(self) -> None:
        super().close()
        if self.started and self.slots is not None:
            self.slots.unlink(missing_ok=True)


class KeepsAbandonedCalls(TransformersRolloutEngine):
    """What is known of a call is forgotten only when all its samples have been yielded."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.known: dict[int, list[GenerationRequest]] = {}

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self.known[number := len(self.known) + self.num_calls] = list(requests)
        async with aclosing(super().generate(requests)) as stream:
            async for output in stream:
                yield output
        del self.known[number]


class TextWorkerStays(TransformersRolloutEngine):
    """The first request with stop strings starts a process for text, which `close` leaves behind."""

    worker: Any = None

    def _job(self, call: Any, request: GenerationRequest, at: int) -> Any:
        if request.sampling.stop_strings and self.worker is None:
            reads = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
            self.worker = subprocess.Popen(reads, stdin=subprocess.PIPE)
            atexit.register(self.worker.communicate)
        return super()._job(call, request, at)
