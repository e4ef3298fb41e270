"""Train engines with wrong optimizer steps: settings, schedule, clipping, skipped steps, reset."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rlsdk.interfaces import (
    Batch,
    ConfigError,
    ForwardBackwardResult,
    Objective,
    OptimSpec,
    OptimStepResult,
    RankContext,
    TrainSpec,
)
from rlsdk.kit.model.optim import learning_rate, set_learning_rate
from rlsdk.reference.torch_engine import TorchTrainEngine


class ClippedNormTold(TorchTrainEngine):
    """The reported norm is that after clipping."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        limit = self.spec.optim.max_grad_norm if self.spec.optim else None
        return result if limit is None else replace(result, grad_norm=min(result.grad_norm, limit))


class ScheduleOneLate(TorchTrainEngine):
    """With a decay, every step uses the rate of the previous step."""

    def optim_step(self) -> OptimStepResult:
        late = self.optim is not None and self.optim.min_lr_ratio > 0 and self.num_steps > 0
        self.num_steps -= late
        result = super().optim_step()
        self.num_steps += late
        return result


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


class BetasFixed(Tuned):
    """The betas are torch's defaults."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, betas=(0.9, 0.999))


class SecondBetaFixed(Tuned):
    """The second beta is torch's default."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, betas=(optim.betas[0], 0.999))


class EpsAtMost(Tuned):
    """eps is at most 1e-2."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, eps=min(optim.eps, 1e-2))


class DecayAtMost(Tuned):
    """Weight decay is at most 1."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, weight_decay=min(optim.weight_decay, 1.0))


class DecayEverywhere(TorchTrainEngine):
    """Norms and biases decay too."""

    def reset_optimizer(self, optim: object) -> None:
        super().reset_optimizer(optim)
        assert self.optimizer is not None
        assert isinstance(optim, OptimSpec)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = optim.weight_decay


class DecayInGradient(TorchTrainEngine):
    """Weight decay is added to the gradient, as in Adam."""

    def optim_step(self) -> OptimStepResult:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=self.optim.weight_decay if parameter.dim() > 1 else 0)
            group["weight_decay"] = 0.0
        return super().optim_step()


class ClipsEachTensor(TorchTrainEngine):
    """Every tensor's gradient is clipped separately."""

    def optim_step(self) -> OptimStepResult:
        limit = self.optim.max_grad_norm if self.optim is not None else None
        for parameter in self.parameters.values():
            if limit is not None and parameter.grad is not None:
                torch.nn.utils.clip_grad_norm_([parameter], limit * 0.7)
        return super().optim_step()


class ClipsEachCall(TorchTrainEngine):
    """The gradient is clipped after every call instead of once per step."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if self.optim is not None and self.optim.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.optim.max_grad_norm)
        return result


class ClipsNothing(TorchTrainEngine):
    """A zero gradient is divided by its norm."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.optim is not None and self.optim.max_grad_norm is not None:
            for gradient in gradients:
                gradient.mul_(norm / norm)
        return super().optim_step()


class SkipsZero(TorchTrainEngine):
    """A step with a zero gradient is skipped, as if it were not finite."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.optimizer is not None and not any(gradient.any() for gradient in gradients):
            self.optimizer.zero_grad()
            return OptimStepResult(grad_norm=0.0, lr=0.0, skipped=True)
        return super().optim_step()


class SkipForgets(TorchTrainEngine):
    """A skipped step clears the moments."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        if result.skipped and self.optimizer is not None:
            self.optimizer.state.clear()
        return result


class SkipKeepsGradients(TorchTrainEngine):
    """A skipped step keeps its gradients."""

    def optim_step(self) -> OptimStepResult:
        held = [(p, None if p.grad is None else p.grad.clone()) for p in self.parameters.values()]
        result = super().optim_step()
        for parameter, gradient in held if result.skipped else ():
            parameter.grad = gradient
        return result


class ResetKeepsMoments(TorchTrainEngine):
    """`reset_optimizer` changes the settings and keeps the moments."""

    def reset_optimizer(self, optim: object) -> None:
        held = self.optimizer.state if getattr(self, "optimizer", None) is not None else None  # type: ignore[union-attr]
        super().reset_optimizer(optim)
        if held is not None and self.optimizer is not None:
            self.optimizer.state = held


class ResetKeepsSchedule(TorchTrainEngine):
    """`reset_optimizer` continues the old schedule."""

    def reset_optimizer(self, optim: object) -> None:
        steps = getattr(self, "num_steps", 0)
        super().reset_optimizer(optim)
        self.num_steps = steps


class TrainsInHalf(TorchTrainEngine):
    """In bfloat16, the master weights are bfloat16."""

    def _split_precision(self) -> dict[str, torch.nn.Parameter]:
        dtype = getattr(torch, self.spec.model.dtype)
        for parameter in self.computed.values():
            parameter.data = parameter.data.to(dtype)
        return self.computed


class IdleStepsUncounted(TorchTrainEngine):
    """A step without any gradient does not count in the schedule."""

    def optim_step(self):
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return OptimStepResult(grad_norm=0.0, lr=learning_rate(self.num_steps, self.optim))
        return super().optim_step()


class IdleStepsSkipped(TorchTrainEngine):
    """A step without any gradient is reported as skipped."""

    def optim_step(self):
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return OptimStepResult(grad_norm=0.0, lr=learning_rate(self.num_steps, self.optim), skipped=True)
        return super().optim_step()


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


class AnySchedule(TorchTrainEngine):
    """An unknown schedule is treated as constant."""

    def reset_optimizer(self, optim: object) -> None:
        assert isinstance(optim, OptimSpec)
        try:
            super().reset_optimizer(optim)
        except ConfigError:
            super().reset_optimizer(replace(optim, schedule="constant"))


class ResetRounds(TorchTrainEngine):
    """A new optimizer starts from the rounded weights of a bfloat16 model."""

    @torch.no_grad()
    def reset_optimizer(self, optim):
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.computed[name])
        super().reset_optimizer(optim)


class MomentsUnclipped(TorchTrainEngine):
    """Clipping scales the step, but not the gradient that enters the moments."""

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        limit, self.optim = self.optim.max_grad_norm, replace(self.optim, max_grad_norm=None)
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        result = super().optim_step()
        self.optim = replace(self.optim, max_grad_norm=limit)
        if limit is not None and result.grad_norm > limit:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name] + (parameter - before[name]) * limit / result.grad_norm)
        return result


class ScheduleCountsCalls(TorchTrainEngine):
    """Every call with rows advances the schedule."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return super().forward_backward(batch, objective)

    def optim_step(self) -> OptimStepResult:
        extra, self.num_calls = max(getattr(self, "num_calls", 1) - 1, 0), 0
        self.num_steps += extra
        return super().optim_step()


class GivesUpSkipping(TorchTrainEngine):
    """A second consecutive skip is an error: training has diverged."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        if result.skipped and getattr(self, "skipped_before", False):
            raise FloatingPointError("two steps in a row were skipped")
        self.skipped_before = result.skipped
        return result


class ResetReads(TorchTrainEngine):
    """`reset_optimizer` also restores the initial weights."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.begun = {name: p.detach().clone() for name, p in self.parameters.items()}

    def reset_optimizer(self, optim: object) -> None:
        super().reset_optimizer(optim)
        with torch.no_grad():
            for name, values in getattr(self, "begun", {}).items():
                self.parameters[name].copy_(values)


class EmbeddingsDoNotDecay(TorchTrainEngine):
    """Embeddings have no weight decay."""

    def optim_step(self) -> OptimStepResult:
        held = self.parameters["model.embed_tokens.weight"]
        assert self.optim is not None
        before, result = held.detach().clone(), super().optim_step()
        if not result.skipped:
            with torch.no_grad():
                held.add_(before * result.lr * self.optim.weight_decay)
        return result


class ThirdCallDropped(TorchTrainEngine):
    """The gradients of a step's third call are dropped."""

    calls = 0

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self.calls += 1
        held = {p: p.grad.clone() for p in self.parameters.values() if p.grad is not None}
        result = super().forward_backward(batch, objective)
        if self.calls == 3:
            for parameter in self.parameters.values():
                parameter.grad = held.get(parameter)
        return result

    def optim_step(self) -> OptimStepResult:
        self.calls = 0
        return super().optim_step()


class ClipsALittleMore(TorchTrainEngine):
    """Clipping divides by the norm plus 0.1, to avoid division by zero."""

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        limit = self.optim.max_grad_norm
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / (norm + 0.1))
        result = super().optim_step()
        return replace(result, grad_norm=norm)


class WarmsUpEarly(TorchTrainEngine):
    """Warm-up is one step too short."""

    def reset_optimizer(self, optim: Any) -> None:
        super().reset_optimizer(replace(optim, warmup_steps=max(optim.warmup_steps - 1, 0)))


class BeginsAgainAtTheEnd(TorchTrainEngine):
    """After the last of `total_steps` the schedule starts again."""

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        total = self.optim.total_steps
        if total is not None and self.num_steps >= total:
            self.num_steps -= total
        return super().optim_step()


class FloorIsZero(TorchTrainEngine):
    """`min_lr_ratio` is ignored."""

    def reset_optimizer(self, optim: Any) -> None:
        super().reset_optimizer(replace(optim, min_lr_ratio=0.0))


class LrOfTheNext(TorchTrainEngine):
    """The learning rate that a step reports is that of the next step."""

    def optim_step(self) -> OptimStepResult:
        from rlsdk.kit.model.optim import learning_rate

        result = super().optim_step()
        assert self.optim is not None
        return replace(result, lr=learning_rate(self.num_steps, self.optim))


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


class InfinityPasses(Stepped):
    """A step with an infinite gradient norm is not skipped."""

    def steps(self, norm, spec):
        return not math.isnan(norm)


class NoLimitNoCheck(Stepped):
    """With `max_grad_norm` None, gradients that are not finite are used."""

    def steps(self, norm, spec):
        return spec.max_grad_norm is None or math.isfinite(norm)


class CosineComesBack(Stepped):
    """The cosine rises again after `total_steps`."""

    def rate(self, spec):
        if spec.schedule != "cosine" or self.num_steps < spec.warmup_steps or spec.total_steps is None:
            return super().rate(spec)
        done = (self.num_steps - spec.warmup_steps) / max(spec.total_steps - spec.warmup_steps, 1)
        left = (1 + math.cos(math.pi * done)) / 2
        return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)


class ResetKeepsBetas(TorchTrainEngine):
    """`reset_optimizer` keeps the betas and eps of the first specification."""

    def reset_optimizer(self, optim):
        if self.optim is not None:
            optim = replace(optim, betas=self.optim.betas, eps=self.optim.eps)
        super().reset_optimizer(optim)


class CountsToAFew(TorchTrainEngine):
    """AdamW's step count is a bfloat16 number, which cannot exceed 256."""

    def optim_step(self) -> OptimStepResult:
        done = super().optim_step()
        for _, state in self._moments():
            state["step"].copy_(state["step"].to(torch.bfloat16))
        return done


class SkipIsZero(TorchTrainEngine):
    """A skipped step reports a norm of 0."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        return replace(result, grad_norm=0.0) if result.skipped else result


class ZeroIsDefault(TorchTrainEngine):
    """A beta of 0 is taken for one that was not given."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, betas=(optim.betas[0] or 0.9, optim.betas[1] or 0.999)))
