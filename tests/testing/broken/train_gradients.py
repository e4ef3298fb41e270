"""Train engines with wrong gradients or losses, or with gradients lost between calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from broken.defect import defect
from broken.train_base import Wrapped
from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    ObjectiveResult,
    OptimStepResult,
    RankContext,
    TrainSpec,
)
from rlsdk.reference.torch_engine import TorchTrainEngine


class Averaged:
    """Base: divides the objective's loss by a number."""

    def __init__(self, objective: Objective, by: float) -> None:
        self.objective, self.by = objective, by

    @property
    def outputs(self) -> Sequence[str]:
        return self.objective.outputs

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        result = self.objective(outputs, batch)
        return replace(result, loss=result.loss / self.by)


@defect({"gradient.micro_batches": "largest difference of loss", "gradient.calls": "loss"})
class MeanOfMeans(TorchTrainEngine):
    """The losses of micro-batches are averaged."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch, Averaged(objective, len(self._cut(batch))))


@defect({"gradient.calls": "largest difference of loss"})
class FirstCallForgotten(TorchTrainEngine):
    """Every call clears the gradients: only those of the last call remain."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return super().forward_backward(batch, objective)


@defect({"step.uneven_calls": "largest difference"})
class LargestCallsOnly(TorchTrainEngine):
    """A call with a single token is skipped."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        long = (batch.lengths > 1).nonzero()[:, 0]
        return super().forward_backward(batch.select(long) if batch.num_tokens == 1 else batch, objective)


@defect({"read_only.no_rows": "largest difference"})
class EmptyCallClears(TorchTrainEngine):
    """A call without rows zeroes the gradients."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if batch.num_rows == 0 and self.optimizer is not None:
            self.optimizer.zero_grad()
        return result


@defect({"read_only.no_rows": "losses of nothing"})
class EmptyCallIsNone(TorchTrainEngine):
    """The loss of a call without rows is NaN: a mean over nothing."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return result if batch.num_rows else replace(result, loss=math.nan)


@defect({"read_only.forward": "largest difference"})
class ForwardClears(TorchTrainEngine):
    """A pass without gradient between a call and the step clears the gradients."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return super().forward(batch, outputs)


@defect({"model.recomputes": "over those without"})
class RecomputesNothing(TorchTrainEngine):
    """`activation_checkpointing` is ignored."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, replace(spec, activation_checkpointing=False))


@defect({"length.gradient": "gradient norm"})
class GradientOfTheBeginning(Wrapped):
    """Tokens after the 256th of a row have log-probs, but no gradient."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        early = batch.position_ids < 256
        found = super().run(batch, names)
        return {n: v if n == "scores" else torch.where(early, v, v.detach()) for n, v in found.items()}


@defect({"model.recomputed": "masked"})
class RecomputedAtOne(Wrapped):
    """Recomputation in the backward pass uses temperature 1."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if not self.spec.activation_checkpointing or not torch.is_grad_enabled():
            return found
        other = super().run(batch.with_meta(temperature=1.0), names)
        return {name: found[name].detach() + other[name] - other[name].detach() for name in names}


@defect({"model.accumulated": "equal calls"})
class CallsInHalf(TorchTrainEngine):
    """In bfloat16, gradients of several calls are summed in bfloat16, those of one call in float32."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        for parameter in self.parameters.values():
            if parameter.grad is not None and self.spec.model.dtype == "bfloat16":
                parameter.grad = parameter.grad.bfloat16().float()
        return result


@defect({"gradient.micro_batches": "passes of 1 row"})
class OneMicroBatch(TorchTrainEngine):
    """A call always reports one micro-batch."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return replace(super().forward_backward(batch, objective), num_micro_batches=1)


@defect({"gradient": "difference of loss"})
class LateTokensDoNotLearn(TorchTrainEngine):
    """The last quarter of the vocabulary's embeddings has no gradient."""

    def optim_step(self) -> OptimStepResult:
        gradient = self.parameters["model.embed_tokens.weight"].grad
        if gradient is not None and "lm_head.weight" in self.parameters:
            gradient[-(len(gradient) // 4) :] = 0
        return super().optim_step()


@defect({"gradient": "gradient norm"})
class NormsNotMeasured(TorchTrainEngine):
    """One-dimensional parameters do not count in the gradient's norm."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None and p.dim() > 1]
        norm = float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
        result = super().optim_step()
        return result if result.skipped else replace(result, grad_norm=norm)


@defect({"objective.both": "difference of loss"})
class EntropyGradientOfTopTokens(Wrapped):
    """The entropy, with gradient, is that of the 32 most probable tokens."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "entropy" in names and torch.is_grad_enabled():
            found["entropy"] = found["entropy"].clamp(max=3.4)
        return found
