"""Train engines that are wrong where two things meet: a loss and its gradient, a save and a reader, bfloat16 and a head
or tied embeddings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from broken.defect import defect
from broken.train_base import Wrapped
from rlsdk.interfaces import Batch, ForwardBackwardResult, Objective, OptimStepResult
from rlsdk.kit.model import outputs as kit_outputs
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"step.infinite_loss": "steps that were skipped"})
class SkipsByTheLoss(TorchTrainEngine):
    """A step whose loss is not finite is skipped, whatever its gradient."""

    finite = True

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        self.finite &= math.isfinite(result.loss)
        return result

    def optim_step(self) -> OptimStepResult:
        finite, self.finite = self.finite, True
        if not finite:
            for parameter in self.parameters.values():
                parameter.grad = None if parameter.grad is None else parameter.grad * math.nan
        return super().optim_step()


@defect({"shards.beside_saves": "others meanwhile"})
class SavesRounded(TorchTrainEngine):
    """Weights are replaced with rounded ones during a save, and restored after it."""

    def save_checkpoint(self, path: Path) -> None:
        held = {name: parameter.data for name, parameter in self.parameters.items()}
        super().save_checkpoint(path)
        for parameter in self.parameters.values():
            parameter.data = parameter.data.bfloat16().float()
        time.sleep(0.02)
        for name, parameter in self.parameters.items():
            parameter.data = held[name]


@defect({"progress": "reports of 6 passes"})
class PassesUnreported(TorchTrainEngine):
    """Passes without gradient report no progress."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        with patch.object(kit_outputs, "advance", lambda: None):
            return super().forward(batch, outputs)


@defect({"length.values": "difference of loss"})
class ValuesTempered(Wrapped):
    """Values are divided by the batch's temperature, as logits are."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return {name: v / batch.temperature if name == "values" else v for name, v in found.items()}


@defect({"objective.unknown_output": "temperature 0.0 was"})
class GreedyTemperature(TorchTrainEngine):
    """For a temperature of 0 or below, log-probs are those of temperature 1."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch if batch.temperature > 0 else batch.with_meta(temperature=1.0), outputs)
