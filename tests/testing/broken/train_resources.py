"""Train engines that leak, or change the state of their process: memory, files, threads, random generators."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Head,
    Objective,
    OptimSpec,
    OptimStepResult,
    RankContext,
    TrainSpec,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import TorchTrainEngine

MIB = 2**20


class Leaks(TorchTrainEngine):
    """Every step leaks a MiB."""

    def optim_step(self) -> OptimStepResult:
        self.kept: list[Any] = [*getattr(self, "kept", ()), bytearray(b"x" * MIB)]
        return super().optim_step()


class LeavesMemory(TorchTrainEngine):
    """Each engine leaks shared memory."""

    left: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def close(self) -> None:
        from multiprocessing.shared_memory import SharedMemory

        if hasattr(self, "model") and self.num_steps:
            self.left.append(SharedMemory(create=True, size=4096))
        super().close()


class SeedsTheProcess(TorchTrainEngine):
    """Seeds the process's random generator, for reproducibility."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        torch.manual_seed(ctx.seed)
        super().initialize(ctx, spec)


class Shuffles(TorchTrainEngine):
    """Micro-batches are trained in a random order."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        cut = super()._cut(batch, objective)
        random.shuffle(cut)
        return cut


class LeavesFiles(TorchTrainEngine):
    """Every checkpoint leaks an open file."""

    left: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        self.left.append((path / "state.json").open())


class LeavesThreads(TorchTrainEngine):
    """Every engine leaks a waiting thread."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class OptimizerFolderStays(TorchTrainEngine):
    """Every engine leaves a folder in the machine's temporary folder."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        tempfile.mkdtemp(prefix="optimizer-")


class AllTheCores(TorchTrainEngine):
    """Uses all cores, whatever `num_threads` says."""

    def initialize(self, ctx, spec):
        torch.set_num_threads(max(os.cpu_count() or 1, ctx.num_threads + 1))
        super().initialize(ctx, spec)


class DefaultDtypeLeft(TorchTrainEngine):
    """The model is built with torch's default dtype set to its own, which is not restored if building raises."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, spec.model.dtype, before))
        super().initialize(ctx, spec)
        torch.set_default_dtype(before)


class KeepsBatches(TorchTrainEngine):
    """The batches of all calls are kept."""

    def forward_backward(self, batch: Batch, objective: Objective) -> Any:
        self.kept: list[Batch] = [*getattr(self, "kept", ()), batch.select(range(1))]
        return super().forward_backward(batch, objective)


class RecomputationDraws(TorchTrainEngine):
    """With recomputation, a training pass advances torch's generator."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if self.spec.activation_checkpointing:
            torch.rand(1)
        return super().forward_backward(batch, objective)


class NewHeadDraws(TorchTrainEngine):
    """A head is initialised from torch's global generator before it is read or drawn with the seed."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.model.head is not Head.LM:
            torch.rand(1)


class ExportDraws(TorchTrainEngine):
    """A random name of a temporary folder advances Python's generator."""

    def save_pretrained(self, path: Path) -> None:
        random.random()
        super().save_pretrained(path)


class ResetSeeds(TorchTrainEngine):
    """`reset_optimizer` seeds the process, as the beginning of a run does."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        if "optimizer" in vars(self) and self.optimizer is not None:
            random.seed(self.ctx.seed)
        super().reset_optimizer(optim)


class HookPerPass(TorchTrainEngine):
    """Every call of `forward` registers another hook."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        self.model.register_forward_hook(lambda *given: None)
        return super().forward(batch, outputs)


class LogPerExport(TorchTrainEngine):
    """Every export opens a log that is closed with the engine."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        self.logs = [*getattr(self, "logs", []), open(os.devnull)]  # noqa: SIM115


class ThreadPerOffload(TorchTrainEngine):
    """Every `offload` starts a thread that is ended with the engine."""

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().offload(parts)
        ended = threading.Event()
        thread = threading.Thread(target=ended.wait, daemon=True)
        thread.start()
        self.threads = [*getattr(self, "threads", []), (ended, thread)]

    def close(self) -> None:
        for ended, thread in getattr(self, "threads", []):
            ended.set()
            thread.join()
        super().close()


class LoadedFilesStay(TorchTrainEngine):
    """The tensors of every checkpoint that was loaded are kept."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.loaded = [*getattr(self, "loaded", []), load_file(path / "state.safetensors")]
