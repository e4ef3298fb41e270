"""Train engines that learn something else: from objectives, gradients and optimizer settings that a first test
lacks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from broken.train_outputs import Wrapped
from rlsdk.interfaces import (
    SCHEMA,
    Batch,
    ForwardBackwardResult,
    Objective,
    ObjectiveResult,
    OptimSpec,
    OptimStepResult,
    RankContext,
    TrainSpec,
)
from rlsdk.reference.torch_engine import TorchTrainEngine


class Through:
    """Base: an objective that is given, and gives, something else."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.whole_groups = getattr(objective, "whole_groups", False)

    @property
    def outputs(self) -> Sequence[str]:
        return self.objective.outputs

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        return self.objective(outputs, batch)


class MaximaFromZero(TorchTrainEngine):
    """Maxima begin at 0."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, maxima={name: max(value, 0.0) for name, value in result.maxima.items()})


class NamesOfTheFirst(TorchTrainEngine):
    """Metrics are those that the first micro-batch tells."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        first: list[ObjectiveResult] = []

        class Noted(Through):
            def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
                first.append(self.objective(outputs, batch))
                return first[-1]

        result = super().forward_backward(batch, Noted(objective))
        told = set(first[0].sums) if first else set()
        return replace(result, sums={name: value for name, value in result.sums.items() if name in told})


class TemperatureKept(TorchTrainEngine):
    """The temperature of the first batch is kept for all that follow."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        kept: float = vars(self).setdefault("temperature", batch.temperature)
        return super().forward_backward(batch.with_meta(temperature=kept), objective)


class GradientAtOne(TorchTrainEngine):
    """The gradient is that of temperature 1."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.with_meta(temperature=1.0), objective)


class EntropyDetached(Wrapped):
    """Under a mask the entropy has no gradient: it is a metric."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "response_mask" in batch and "entropy" in found and "log_probs" in found:
            found["entropy"] = found["entropy"].detach()
        return found


class ForeignFieldsDropped(TorchTrainEngine):
    """An objective is given the fields that the core knows."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.keep([name for name in SCHEMA if name in batch]), objective)


class MetaDropped(TorchTrainEngine):
    """Of the numbers of a batch, the temperature alone reaches the objective."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(replace(batch, meta={"temperature": batch.temperature}), objective)


class InputsChanged(TorchTrainEngine):
    """Weights of first positions are set to 0 in the batch that was given."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if "loss_weight" in batch:
            batch["loss_weight"][batch.position_ids == 0] = 0.0
        return super().forward_backward(batch, objective)


class LastRowAgain(TorchTrainEngine):
    """A pass with fewer rows than it may have is filled up with one of them."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        cut, limit = super()._cut(batch, objective), self.spec.micro_batch_rows
        if objective is None or limit is None:
            return cut
        return [torch.cat([rows, rows[:1]]) if 1 < len(rows) < limit else rows for rows in cut]


class GroupsSplit(TorchTrainEngine):
    """Does not know of objectives that compare rows."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return super()._cut(batch)


class RaisedAndKept(TorchTrainEngine):
    """What was gathered before an objective raised stays."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except Exception:
            for parameter, gradient in getattr(self, "held", ()):
                parameter.grad = gradient
            raise

    def _collect_gradients(self) -> None:
        super()._collect_gradients()
        self.held = [(p, p.grad) for p in self.parameters.values()]


class RaisedAsOther(TorchTrainEngine):
    """What an objective raises comes out as an error of the engine."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except ArithmeticError:
            raise
        except Exception as error:
            raise ValueError(f"training failed: {error}") from error


class EarlierCallsKept(TorchTrainEngine):
    """When an objective raises, the gradients of earlier calls stay."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        before = [(p, None if p.grad is None else p.grad.clone()) for p in self.parameters.values()]
        try:
            return super().forward_backward(batch, objective)
        except Exception:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise


class UnknownIsZero(TorchTrainEngine):
    """An output that the head does not give is zeros."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        try:
            return super().forward(batch, outputs)
        except Exception:
            return {name: torch.zeros(batch.num_tokens) for name in outputs}


class UnknownIsKeyError(TorchTrainEngine):
    """An objective that asks for an output that there is not meets a KeyError."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        strange = [name for name in objective.outputs if name == "logprobs"]
        if strange:
            raise KeyError(strange[0])
        return super().forward_backward(batch, objective)


class Tuned(TorchTrainEngine):
    """Base: an optimizer with other settings than those asked for."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return optim

    def reset_optimizer(self, optim: object) -> None:
        assert isinstance(optim, OptimSpec)
        super().reset_optimizer(self.tuned(optim))


class BetasFixed(Tuned):
    """betas are torch's defaults."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, betas=(0.9, 0.999))


class SecondBetaFixed(Tuned):
    """The second beta is torch's default."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, betas=(optim.betas[0], 0.999))


class EpsAtMost(Tuned):
    """eps is 1e-2 at the most."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, eps=min(optim.eps, 1e-2))


class DecayAtMost(Tuned):
    """Weight decay is 1 at the most."""

    def tuned(self, optim: OptimSpec) -> OptimSpec:
        return replace(optim, weight_decay=min(optim.weight_decay, 1.0))


class DecayEverywhere(TorchTrainEngine):
    """Norms and biases decay, too."""

    def reset_optimizer(self, optim: object) -> None:
        super().reset_optimizer(optim)
        assert self.optimizer is not None
        assert isinstance(optim, OptimSpec)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = optim.weight_decay


class DecayInGradient(TorchTrainEngine):
    """Weight decay is added to the gradient, as Adam before AdamW did."""

    def optim_step(self) -> OptimStepResult:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=self.optim.weight_decay if parameter.dim() > 1 else 0)
            group["weight_decay"] = 0.0
        return super().optim_step()


class ClipsEachTensor(TorchTrainEngine):
    """Every tensor's gradient is clipped by itself."""

    def optim_step(self) -> OptimStepResult:
        limit = self.optim.max_grad_norm if self.optim is not None else None
        for parameter in self.parameters.values():
            if limit is not None and parameter.grad is not None:
                torch.nn.utils.clip_grad_norm_([parameter], limit * 0.7)
        return super().optim_step()


class ClipsEachCall(TorchTrainEngine):
    """The gradient is clipped after every call, and not once for a step."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if self.optim is not None and self.optim.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.optim.max_grad_norm)
        return result


class ClipsNothing(TorchTrainEngine):
    """A gradient of zero is divided by its norm."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.optim is not None and self.optim.max_grad_norm is not None:
            for gradient in gradients:
                gradient.mul_(norm / norm)
        return super().optim_step()


class SkipsZero(TorchTrainEngine):
    """A gradient of zero is skipped, as if it were not finite."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.optimizer is not None and not any(gradient.any() for gradient in gradients):
            self.optimizer.zero_grad()
            return OptimStepResult(grad_norm=0.0, lr=0.0, skipped=True)
        return super().optim_step()


class SkipForgets(TorchTrainEngine):
    """A step that is skipped clears the moments."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        if result.skipped and self.optimizer is not None:
            self.optimizer.state.clear()
        return result


class SkipKeepsGradients(TorchTrainEngine):
    """A step that is skipped leaves its gradients where they are."""

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
    """`reset_optimizer` goes on with the schedule where it was."""

    def reset_optimizer(self, optim: object) -> None:
        steps = getattr(self, "num_steps", 0)
        super().reset_optimizer(optim)
        self.num_steps = steps


class ByShareOfTokens(TorchTrainEngine):
    """Each micro-batch counts by its share of the tokens, and not by its own weights."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        tokens, passes = batch.num_tokens, len(self._cut(batch, objective))

        class Shared(Through):
            def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
                result = self.objective(outputs, batch)
                part = result.loss * (batch.num_tokens * passes / tokens)
                # The value stays, and the gradient alone is another.
                return replace(result, loss=part + (result.loss - part).detach())

        return super().forward_backward(batch, Shared(objective))


class LargestCallsOnly(TorchTrainEngine):
    """A call of a single token is left out."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        long = (batch.lengths > 1).nonzero()[:, 0]
        return super().forward_backward(batch.select(long) if batch.num_tokens == 1 else batch, objective)


class TrainsInHalf(TorchTrainEngine):
    """In bfloat16, what is stepped are bfloat16 weights."""

    def _split_precision(self) -> dict[str, torch.nn.Parameter]:
        dtype = getattr(torch, self.spec.model.dtype)
        for parameter in self.computed.values():
            parameter.data = parameter.data.to(dtype)
        return self.computed


class AddsInHalf(TorchTrainEngine):
    """In bfloat16, gradients of micro-batches are added up in bfloat16."""

    def _collect_gradients(self) -> None:
        """Later, in the step."""

    def optim_step(self) -> OptimStepResult:
        super()._collect_gradients()
        return super().optim_step()


class RecomputedWithoutInput(TorchTrainEngine):
    """With recomputation nothing in front of the first layer has a gradient: reentrant, of an input without one."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.activation_checkpointing:
            embedding = self.model.get_input_embeddings()
            embedding.register_forward_hook(lambda module, given, result: result.detach().requires_grad_())


class DrawnByProcess(TorchTrainEngine):
    """Random weights are drawn from the process's generator, whatever the seed of the run."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, seed=random.randrange(2**30)) if spec.init_from_config else ctx, spec)


class SeedsTheProcess(TorchTrainEngine):
    """Seeds the process's generator, for reproducibility."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        torch.manual_seed(ctx.seed)
        super().initialize(ctx, spec)


class Shuffles(TorchTrainEngine):
    """Micro-batches are trained in a random order."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        cut = super()._cut(batch, objective)
        random.shuffle(cut)
        return cut


class BeginsRounded(TorchTrainEngine):
    """Float32 weights are read in bfloat16."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(parameter.bfloat16().float())


class RowsByNumber(TorchTrainEngine):
    """A row's identity is taken for its place in the batch."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        order = batch["row_id"].argsort()
        found = super().forward(batch, outputs)
        if "scores" in outputs or bool((order == torch.arange(batch.num_rows)).all()):
            return found
        at = batch.token_index(order)
        return {name: values[at] for name, values in found.items()}


class EmptyCallClears(TorchTrainEngine):
    """A call without rows zeroes the gradients."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if batch.num_rows == 0 and self.optimizer is not None:
            self.optimizer.zero_grad()
        return result


class EmptyCallIsNone(TorchTrainEngine):
    """The loss of no rows is not a number: a mean over none."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return result if batch.num_rows else replace(result, loss=math.nan)


class ForwardClears(TorchTrainEngine):
    """A pass without gradient between call and step clears the gradients."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return super().forward(batch, outputs)
