"""Train engines with wrong optimizer steps: settings, schedule, clipping, skipped steps, reset."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch

from broken.defect import defect
from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    OptimSpec,
    OptimStepResult,
    RankContext,
    TrainSpec,
)
from rlsdk.kit.model.optim import learning_rate, set_learning_rate
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"step.clipping": "gradient norm"})
class ClippedNormTold(TorchTrainEngine):
    """The reported norm is that after clipping."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        limit = self.spec.optim.max_grad_norm if self.spec.optim else None
        return result if limit is None else replace(result, grad_norm=min(result.grad_norm, limit))


@defect({"step.skipped": "largest difference"})
class StepsOnNaN(TorchTrainEngine):
    """A gradient that is not finite counts as a step of the schedule."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        self.num_steps += result.skipped
        return result


class Tuned(TorchTrainEngine):
    """Base: an optimizer with settings other than the requested ones."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return optim

    def reset_optimizer(self, optim: object) -> None:
        assert isinstance(optim, OptimSpec)
        super().reset_optimizer(self.tuned(optim))


@defect({"step.settings": "large eps"})
class EpsAtMost(Tuned):
    """eps is at most 1e-2."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, eps=min(optim.eps, 1e-2))


@defect({"step.settings": "strong decay"})
class DecayAtMost(Tuned):
    """Weight decay is at most 1."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, weight_decay=min(optim.weight_decay, 1.0))


@defect({"step.clipping_calls": "limit"})
class ClipsEachCall(TorchTrainEngine):
    """The gradient is clipped after every call instead of once per step."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if self.optim is not None and self.optim.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.optim.max_grad_norm)
        return result


@defect({"step.zero_gradient": "skipped"})
class SkipsZero(TorchTrainEngine):
    """A step with a zero gradient is skipped, as if it were not finite."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.optimizer is not None and not any(gradient.any() for gradient in gradients):
            self.optimizer.zero_grad()
            return OptimStepResult(grad_norm=0.0, lr=0.0, skipped=True)
        return super().optim_step()


@defect({"step.reset": "rate"})
class ResetKeepsSchedule(TorchTrainEngine):
    """`reset_optimizer` continues the old schedule."""

    def reset_optimizer(self, optim: object) -> None:
        steps = getattr(self, "num_steps", 0)
        super().reset_optimizer(optim)
        self.num_steps = steps


@defect({"model.small_steps": "movement"})
class TrainsInHalf(TorchTrainEngine):
    """In bfloat16, the master weights are bfloat16."""

    def _split_precision(self) -> dict[str, torch.nn.Parameter]:
        dtype = getattr(torch, self.spec.model.dtype)
        for parameter in self.computed.values():
            parameter.data = parameter.data.to(dtype)
        return self.computed


@defect({"step.idle": "difference of the rate"})
class IdleStepsUncounted(TorchTrainEngine):
    """A step without any gradient does not count in the schedule."""

    def optim_step(self):
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return OptimStepResult(grad_norm=0.0, lr=learning_rate(self.num_steps, self.optim))
        return super().optim_step()


@defect({"step.idle": "steps that were skipped"})
class IdleStepsSkipped(TorchTrainEngine):
    """A step without any gradient is reported as skipped."""

    def optim_step(self):
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return OptimStepResult(grad_norm=0.0, lr=learning_rate(self.num_steps, self.optim), skipped=True)
        return super().optim_step()


@defect({"isolation": "largest difference of weights, beside a trained one"})
class OneClip(TorchTrainEngine):
    """The norm limit is that of the last engine that was built in the process."""

    limit: ClassVar[float | None] = None

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.optim is not None:
            OneClip.limit = spec.optim.max_grad_norm

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        self.optim = replace(self.optim, max_grad_norm=OneClip.limit)
        return super().optim_step()


@defect({"step.schedule": "difference of the rate"})
class FloorIsZero(TorchTrainEngine):
    """`min_lr_ratio` is ignored."""

    def reset_optimizer(self, optim: Any) -> None:
        super().reset_optimizer(replace(optim, min_lr_ratio=0.0))


class Stepped(TorchTrainEngine):
    """Not broken: `optim_step` with its parts as methods."""

    def optim_step(self):
        optimizer, spec = self._trained()
        lr = self.rate(spec)
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        limit = math.inf if spec.max_grad_norm is None else spec.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit)) if parameters else 0.0
        steps = self.steps(norm, spec)
        if steps:
            set_learning_rate(optimizer, lr)
            optimizer.step()
            self._round_weights()
            self.num_steps += 1
        optimizer.zero_grad()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not steps)

    def rate(self, spec):
        return learning_rate(self.num_steps, spec)

    def steps(self, norm, spec):
        return math.isfinite(norm)


@defect({"step.infinite": "a step with a gradient that is not finite"})
class InfinityPasses(Stepped):
    """A step with an infinite gradient norm is not skipped."""

    def steps(self, norm, spec):
        return not math.isnan(norm)


@defect({"step.skipped": "skipped"})
class NoLimitNoCheck(Stepped):
    """With `max_grad_norm` None, gradients that are not finite are used."""

    def steps(self, norm, spec):
        return spec.max_grad_norm is None or math.isfinite(norm)


@defect({"step.schedule_end": "difference of the rate, cosine"})
class CosineComesBack(Stepped):
    """The cosine rises again after `total_steps`."""

    def rate(self, spec):
        if spec.schedule != "cosine" or self.num_steps < spec.warmup_steps or spec.total_steps is None:
            return super().rate(spec)
        done = (self.num_steps - spec.warmup_steps) / max(spec.total_steps - spec.warmup_steps, 1)
        left = (1 + math.cos(math.pi * done)) / 2
        return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)


@defect({"step.reset": "gradient norm"})
class ResetKeepsBetas(TorchTrainEngine):
    """`reset_optimizer` keeps the betas and eps of the first specification."""

    def reset_optimizer(self, optim):
        if self.optim is not None:
            optim = replace(optim, betas=self.optim.betas, eps=self.optim.eps)
        super().reset_optimizer(optim)


@defect({"checkpoint.many_steps": "difference of the last step"})
class CountsToAFew(TorchTrainEngine):
    """AdamW's step count is a bfloat16 number, which cannot exceed 256."""

    def optim_step(self) -> OptimStepResult:
        done = super().optim_step()
        for _, state in self._moments():
            state["step"].copy_(state["step"].to(torch.bfloat16))
        return done


@defect({"step.skipped_later": "which is finite"})
class SkipIsZero(TorchTrainEngine):
    """A skipped step reports a norm of 0."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        return replace(result, grad_norm=0.0) if result.skipped else result


@defect({"step.settings": "no memory"})
class ZeroIsDefault(TorchTrainEngine):
    """A beta of 0 is taken for one that was not given."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, betas=(optim.betas[0] or 0.9, optim.betas[1] or 0.999)))
