"""Train engines that are wrong only in one state: half offloaded, in the middle of a step, with a new head, on several
ranks between steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from broken.defect import defect
from rlsdk.interfaces import (
    CheckpointError,
    Head,
    OptimSpec,
    OptimStepResult,
    RankContext,
    TrainSpec,
    WeightLayout,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp.engine import FsdpTrainEngine


@defect({"random_calls.heads": "not skipped"})
class CriticsStepOnNaN(TorchTrainEngine):
    """Only the step of a language model looks whether the gradient is finite."""

    def optim_step(self) -> OptimStepResult:
        if self.spec.model.head is Head.LM:
            return super().optim_step()
        with patch("rlsdk.reference.torch_engine.math.isfinite", lambda _: True):
            return super().optim_step()


@defect({"random_calls.random_weights": "largest difference"})
class RandomDoesNotDecay(TorchTrainEngine):
    """Weights of a model that starts at random do not decay."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(optim)
        if self.spec.init_from_config and self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0


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


@defect({"offload.partial": "norms that differ"})
class SavesWithoutGradients(Leaving):
    """A checkpoint that is written while the gradients are away drops them."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        if "gradients" in self.away:
            for parameter in self.parameters.values():
                parameter.grad = None


@defect({"offload.partial": "the layout changed"})
class LayoutOfWhatIsHere(Leaving):
    """Without its weights on the device, the layout is empty."""

    def layout(self) -> WeightLayout:
        with patch.object(self, "_served", dict) if "weights" in self.away else patch.object(self, "away", self.away):
            return super().layout()


@defect({"random_calls.ranks": "learning rate"}, ranks=True)
class SkippedRateMoves(FsdpTrainEngine):
    """On several ranks, a skipped step of a later rank advances the reported rate."""

    extra = 0.0

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        self.extra += 1e-3 * result.lr if result.skipped else 0.0
        ahead = self.extra if self.ctx.rank else 0.0
        return OptimStepResult(grad_norm=result.grad_norm, lr=result.lr + ahead, skipped=result.skipped)


@defect({"ranks.damaged": "was accepted"}, ranks=True)
class OwnFileOnly(FsdpTrainEngine):
    """Each rank accepts a damaged checkpoint unless it is the first: it continues with what it had."""

    def load_checkpoint(self, path: Path) -> None:
        try:
            super().load_checkpoint(path)
        except CheckpointError:
            if self.ctx.rank == 0:
                raise
