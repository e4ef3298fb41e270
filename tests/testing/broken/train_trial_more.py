"""Train engines of a second blind trial, written without a look at what the requirements measure: of 21, they caught
19.

Then calls had to leave torch's modes as they were, and layouts to name the process that holds the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from broken.train_outputs import Wrapped
from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Head,
    Objective,
    OptimStepResult,
    WeightLayout,
)
from rlsdk.reference.torch_engine import TorchTrainEngine


class LastOfLongUnread(Wrapped):
    """The last token of a row of more than 300 has a log-prob of 0."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        long = torch.repeat_interleave(batch.lengths > 300, batch.lengths)
        last = torch.zeros(batch.num_tokens, dtype=torch.bool)
        last[batch.offsets[1:] - 1] = True
        return {n: torch.where(long & last, 0.0, v) if n == "log_probs" else v for n, v in found.items()}


class ThirdCallDropped(TorchTrainEngine):
    """The gradients of a step's third call are not added."""

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
    """Clipping divides by the norm and a tenth: against division by zero."""

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
    """Warm-up is one step shorter than was asked for."""

    def reset_optimizer(self, optim: Any) -> None:
        super().reset_optimizer(replace(optim, warmup_steps=max(optim.warmup_steps - 1, 0)))


class BeginsAgainAtTheEnd(TorchTrainEngine):
    """Behind the last of `total_steps` the schedule begins again."""

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        total = self.optim.total_steps
        if total is not None and self.num_steps >= total:
            self.num_steps -= total
        return super().optim_step()


class FloorIsZero(TorchTrainEngine):
    """`min_lr_ratio` is not read."""

    def reset_optimizer(self, optim: Any) -> None:
        super().reset_optimizer(replace(optim, min_lr_ratio=0.0))


class LossOfTheLast(TorchTrainEngine):
    """The loss that is told is that of the last micro-batch."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        losses: list[float] = []

        class Noted:
            whole_groups = getattr(objective, "whole_groups", False)
            outputs = objective.outputs

            def __call__(self, outputs: Any, part: Batch) -> Any:
                result = objective(outputs, part)
                losses.append(float(result.loss.detach()))
                return result

        result = super().forward_backward(batch, Noted())
        return replace(result, loss=losses[-1] if losses else result.loss)


class MaximaAddedUp(TorchTrainEngine):
    """Maxima of micro-batches are added up."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        many = result.num_micro_batches
        return replace(result, maxima={n: v * many for n, v in result.maxima.items()} if many > 1 else result.maxima)


class OneMicroBatch(TorchTrainEngine):
    """A call says that it took one micro-batch, however many there were."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return replace(super().forward_backward(batch, objective), num_micro_batches=1)


class ForwardInHalf(TorchTrainEngine):
    """Outputs without gradient come as bfloat16."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return {name: values.bfloat16() for name, values in super().forward(batch, outputs).items()}


class GradientModeLeft(TorchTrainEngine):
    """A pass without gradient leaves gradients off for whoever comes next."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        torch.set_grad_enabled(False)
        return found

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        torch.set_grad_enabled(True)
        return super().forward_backward(batch, objective)

    def close(self) -> None:
        torch.set_grad_enabled(True)
        super().close()


class ExportCutsOff(TorchTrainEngine):
    """Exports in bfloat16 cut the mantissa off, and do not round."""

    def save_pretrained(self, path: Path) -> None:
        held = {name: p.data for name, p in self.parameters.items()}
        if self.spec.model.dtype == "bfloat16" and self.parameters is not self.computed:
            for parameter in self.parameters.values():
                bits = parameter.data.view(torch.int32) & -65536
                parameter.data = bits.view(torch.float32)
        super().save_pretrained(path)
        for name, parameter in self.parameters.items():
            parameter.data = held[name]


class MomentsInHalf(TorchTrainEngine):
    """A checkpoint has its moments in bfloat16."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        tensors = load_file(path / "state.safetensors")
        halved = {n: t.bfloat16().float() if n.startswith("exp_avg") else t for n, t in tensors.items()}
        save_file({n: t.clone() for n, t in halved.items()}, path / "state.safetensors")


class SaysItsNodeOnly(TorchTrainEngine):
    """A layout names the node as its process."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), process=self.ctx.node)


class ForwardNotSoCold(Wrapped):
    """Passes without gradient know no temperature below 0.5."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        temperature = batch.meta.get("temperature", 1.0)
        if not torch.is_grad_enabled() and temperature < 0.5:
            batch = batch.with_meta(temperature=0.5)
        return super().run(batch, names)


class HeadAlone(Wrapped):
    """A value head's gradient ends at the head."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if self.spec.model.head is Head.VALUE and torch.is_grad_enabled():
            self.model.model.requires_grad_(False)
            found = super().run(batch, names)
            self.model.model.requires_grad_(True)
        return found


class LateTokensDoNotLearn(TorchTrainEngine):
    """The last quarter of the vocabulary's embeddings has no gradient."""

    def optim_step(self) -> OptimStepResult:
        gradient = self.parameters["model.embed_tokens.weight"].grad
        if gradient is not None and "lm_head.weight" in self.parameters:
            gradient[-(len(gradient) // 4) :] = 0
        return super().optim_step()


class NormsNotMeasured(TorchTrainEngine):
    """Parameters of one dimension do not count in the gradient's norm."""

    def optim_step(self) -> OptimStepResult:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None and p.dim() > 1]
        norm = float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
        result = super().optim_step()
        return result if result.skipped else replace(result, grad_norm=norm)


class LrOfTheNext(TorchTrainEngine):
    """The learning rate that a step tells is that of the next one."""

    def optim_step(self) -> OptimStepResult:
        from rlsdk.kit.optim import learning_rate

        result = super().optim_step()
        assert self.optim is not None
        return replace(result, lr=learning_rate(self.num_steps, self.optim))


class CannotSaveTwice(TorchTrainEngine):
    """A checkpoint cannot be written into a folder that exists."""

    def save_pretrained(self, path: Path) -> None:
        os.mkdir(path)
        super().save_pretrained(path)


class EntropyOfTheLikeliest(Wrapped):
    """The entropy is that of the 32 likeliest tokens, with gradient."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "entropy" in names and torch.is_grad_enabled():
            found["entropy"] = found["entropy"].clamp(max=3.4)
        return found
