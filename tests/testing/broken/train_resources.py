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

from broken.defect import defect
from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Head,
    Objective,
    OptimStepResult,
    RankContext,
    TrainSpec,
)
from rlsdk.reference.torch_engine import TorchTrainEngine

MIB = 2**20


@defect({"memory": "MiB that 15 steps added"})
class Leaks(TorchTrainEngine):
    """Every step leaks a MiB."""

    def optim_step(self) -> OptimStepResult:
        self.kept: list[Any] = [*getattr(self, "kept", ()), bytearray(b"x" * MIB)]
        return super().optim_step()


@defect({"resources": "threads"})
class LeavesThreads(TorchTrainEngine):
    """Every engine leaks a waiting thread."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@defect({"close": "temporary folder"})
class OptimizerFolderStays(TorchTrainEngine):
    """Every engine leaves a folder in the machine's temporary folder."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        tempfile.mkdtemp(prefix="optimizer-")


@defect({"place.threads": "threads"})
class AllTheCores(TorchTrainEngine):
    """Uses all cores, whatever `num_threads` says."""

    def initialize(self, ctx, spec):
        torch.set_num_threads(max(os.cpu_count() or 1, ctx.num_threads + 1))
        super().initialize(ctx, spec)


@defect({"memory": "objects kept"})
class KeepsBatches(TorchTrainEngine):
    """The batches of all calls are kept."""

    def forward_backward(self, batch: Batch, objective: Objective) -> Any:
        self.kept: list[Batch] = [*getattr(self, "kept", ()), batch.select(range(1))]
        return super().forward_backward(batch, objective)


@defect({"random_state": "random weights: 1"})
class RecomputationDraws(TorchTrainEngine):
    """With recomputation, a training pass advances torch's generator."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if self.spec.activation_checkpointing:
            torch.rand(1)
        return super().forward_backward(batch, objective)


@defect({"random_state": "a new head of values: 1"})
class NewHeadDraws(TorchTrainEngine):
    """A head is initialised from torch's global generator before it is read or drawn with the seed."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.model.head is not Head.LM:
            torch.rand(1)


@defect({"random_state": "moved on"})
class ExportDraws(TorchTrainEngine):
    """A random name of a temporary folder advances Python's generator."""

    def save_pretrained(self, path: Path) -> None:
        random.random()
        super().save_pretrained(path)


@defect({"resources.calls": "objects that each round left"})
class HookPerPass(TorchTrainEngine):
    """Every call of `forward` registers another hook."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        self.model.register_forward_hook(lambda *given: None)
        return super().forward(batch, outputs)


@defect({"resources.calls": "FileIO"})
class LogPerExport(TorchTrainEngine):
    """Every export opens a log that is closed with the engine."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        self.logs = [*getattr(self, "logs", []), open(os.devnull)]  # noqa: SIM115


@defect({"resources.calls": "torch.Tensor"})
class LoadedFilesStay(TorchTrainEngine):
    """The tensors of every checkpoint that was loaded are kept."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.loaded = [*getattr(self, "loaded", []), load_file(path / "state.safetensors")]
