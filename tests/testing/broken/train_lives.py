"""Train engines that are wrong only in one state: half offloaded, in the middle of a step, with a new head, on several
ranks between steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    CheckpointError,
    ForwardBackwardResult,
    Head,
    Objective,
    OptimSpec,
    OptimStepResult,
    RankContext,
    TrainSpec,
    WeightLayout,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp.engine import FsdpTrainEngine


class CriticsStepOnNaN(TorchTrainEngine):
    """Only the step of a language model looks whether the gradient is finite."""

    def optim_step(self) -> OptimStepResult:
        if self.spec.model.head is Head.LM:
            return super().optim_step()
        with patch("rlsdk.reference.torch_engine.math.isfinite", lambda _: True):
            return super().optim_step()


class HeadKeepsGradient(TorchTrainEngine):
    """After an objective that raised, only the gradients of the model below the head are dropped."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        heads = [p for name, p in self.parameters.items() if name.startswith("score.")]
        before = [None if p.grad is None else p.grad.clone() for p in heads]
        try:
            return super().forward_backward(batch, objective)
        except Exception:
            for head, gradient in zip(heads, before, strict=True):
                head.grad = gradient
            raise


class NewHeadStays(TorchTrainEngine):
    """The optimizer has the tensors of the checkpoint only: a head that it lacks is never trained."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        from safetensors import safe_open

        files = [safe_open(file, "pt") for file in Path(spec.model.path).glob("*.safetensors")]
        self.known = {name for file in files for name in file.keys()}  # noqa: SIM118 - no dict

    def optim_step(self) -> OptimStepResult:
        new = [p for name, p in self.parameters.items() if name.startswith("score.") and name not in self.known]
        held = [p.detach().clone() for p in new]
        result = super().optim_step()
        with torch.no_grad():
            for parameter, before in zip(new, held, strict=True):
                parameter.copy_(before)
        return result


class RandomDoesNotDecay(TorchTrainEngine):
    """Weights of a model that starts at random do not decay."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(optim)
        if self.spec.init_from_config and self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0


class RoutersOfCritics(TorchTrainEngine):
    """The loss that balances a router is left out for language models only."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if self.spec.model.head is not Head.LM:
            for name, parameter in self.parameters.items():
                if name.endswith(".gate.weight") and parameter.grad is not None:
                    parameter.grad += 0.01 * parameter.detach()
        return result


class Leaving(TorchTrainEngine):
    """Base: keeps the names of parts that are off the device."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.away = set[str]()
        super().initialize(ctx, spec)

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().offload(parts)
        self.away |= set(parts)

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        self.away -= set(parts)


class SavesWithoutGradients(Leaving):
    """A checkpoint that is written while the gradients are away drops them."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        if "gradients" in self.away:
            for parameter in self.parameters.values():
                parameter.grad = None


class LayoutOfWhatIsHere(Leaving):
    """Without its weights on the device, the layout is empty."""

    def layout(self) -> WeightLayout:
        with patch.object(self, "_served", dict) if "weights" in self.away else patch.object(self, "away", self.away):
            return super().layout()


class OnloadsEverything(Leaving):
    """Parts come back from one copy of all: what was added to a part that came back earlier is lost."""

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().offload(parts)
        self.copies = {part: [t.detach().clone() for t in self._tensors_of(part)] for part in parts}

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        with torch.no_grad():
            for part, tensors in self.copies.items():
                for tensor, copy in zip(self._tensors_of(part), tensors, strict=False):
                    tensor.copy_(copy)


class ExportsAreSteps(TorchTrainEngine):
    """An export clears the gradients that it needs the memory of, if there are any of several calls."""

    calls = 0

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self.calls += 1
        return super().forward_backward(batch, objective)

    def optim_step(self) -> OptimStepResult:
        self.calls = 0
        return super().optim_step()

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        if self.calls > 1:
            for parameter in self.parameters.values():
                parameter.grad = None


class RanksLookRoughly(FsdpTrainEngine):
    """On several ranks, outputs are rounded while there are gradients of an unfinished step."""

    in_step = False

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        rounds = self.in_step and self.ctx.world_size > 1
        return {name: values.bfloat16().float() if rounds else values for name, values in found.items()}

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self.in_step = True
        return super().forward_backward(batch, objective)

    def optim_step(self) -> OptimStepResult:
        self.in_step = False
        return super().optim_step()


class RanksExportOnce(FsdpTrainEngine):
    """On several ranks, what was gathered for the first export is also written by later ones."""

    first: Path | None = None

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        dist.barrier()
        if self.first is not None and self.ctx.rank == 0 and self.ctx.world_size > 1:
            for file in self.first.glob("*.safetensors"):
                (path / file.name).write_bytes(file.read_bytes())
        self.first = self.first or path


class SkippedRateMoves(FsdpTrainEngine):
    """On several ranks, a skipped step of a later rank advances the reported rate."""

    extra = 0.0

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        self.extra += 1e-3 * result.lr if result.skipped else 0.0
        ahead = self.extra if self.ctx.rank else 0.0
        return OptimStepResult(grad_norm=result.grad_norm, lr=result.lr + ahead, skipped=result.skipped)


class OwnFileOnly(FsdpTrainEngine):
    """Each rank accepts a damaged checkpoint unless it is the first: it continues with what it had."""

    def load_checkpoint(self, path: Path) -> None:
        try:
            super().load_checkpoint(path)
        except CheckpointError:
            if self.ctx.rank == 0:
                raise
