"""Train engines that are wrong only with training in bfloat16, whose numbers are not plain torch's anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from broken.train_base import Wrapped
from rlsdk.interfaces import Batch, ForwardBackwardResult, Objective, OptimSpec, OptimStepResult
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp.engine import FsdpTrainEngine


def is_half(engine: TorchTrainEngine | FsdpTrainEngine) -> bool:
    return engine.spec.model.dtype == "bfloat16"


class HalfDoesNotDecay(TorchTrainEngine):
    """The optimizer of the float32 weights is built without the decay."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, weight_decay=0.0) if is_half(self) else optim)


class HalfDefaultBetas(TorchTrainEngine):
    """The optimizer of the float32 weights is built without the betas."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, betas=(0.9, 0.999)) if is_half(self) else optim)


class HalfDefaultEps(TorchTrainEngine):
    """The optimizer of the float32 weights is built without eps."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, eps=1e-8) if is_half(self) else optim)


class HalfUnscheduled(TorchTrainEngine):
    """The rate of the float32 weights is constant."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, schedule="constant", warmup_steps=0) if is_half(self) else optim)


class HalfTellsClippedNorm(TorchTrainEngine):
    """The norm reported is that after clipping."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        limit = self.optim.max_grad_norm if self.optim is not None else None
        return replace(result, grad_norm=min(result.grad_norm, limit)) if is_half(self) and limit else result


class HalfStepsOnNaN(TorchTrainEngine):
    """Gradients that are not finite are set to 0, and the step is made."""

    def optim_step(self) -> OptimStepResult:
        for parameter in self.parameters.values() if is_half(self) else ():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().optim_step()


class HalfMean(TorchTrainEngine):
    """Gradients are averaged over the micro-batches of a call."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        before = {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}
        result = super().forward_backward(batch, objective)
        for name, parameter in self.parameters.items() if is_half(self) else ():
            if parameter.grad is not None:
                held = before[name] if before[name] is not None else torch.zeros_like(parameter)
                parameter.grad.copy_(held + (parameter.grad - held) / max(result.num_micro_batches, 1))
        return result


class HalfAtOne(Wrapped):
    """Logits are not divided by the temperature."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        return super().run(batch.with_meta(temperature=1.0) if is_half(self) else batch, names)


class HalfUnmasked(Wrapped):
    """Outputs are not masked in passes with gradient."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        if is_half(self) and torch.is_grad_enabled():
            batch = replace(batch, tokens={n: t for n, t in batch.tokens.items() if n != "response_mask"})
        return super().run(batch, names)


class HalfEntropyDetached(Wrapped):
    """The entropy has no gradient beside log-probs."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        beside = is_half(self) and len(found) > 1
        return {name: values.detach() if beside and name == "entropy" else values for name, values in found.items()}


class HalfHeadScaled(Wrapped):
    """A head's numbers are scaled, as by a head that is initialised anew for bfloat16."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return {
            n: values * 1.5 if is_half(self) and n in ("values", "scores") else values for n, values in found.items()
        }


class HalfRanksDecayTwice(FsdpTrainEngine):
    """On several ranks, the weights decay twice."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        twice = is_half(self) and self.ctx.world_size > 1
        super().reset_optimizer(replace(optim, weight_decay=2 * optim.weight_decay) if twice else optim)
