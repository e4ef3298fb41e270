"""Twenty train engines that were written after the kit's requirements, as a blind trial: they caught 12.

They were then widened by what the other eight share: groups of one prompt, many rows, unlikely tokens, recomputation
under a temperature, calls in bfloat16, two skips in a row, names in a list, every set of parts that is lent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from broken.train_outputs import Wrapped
from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    OptimStepResult,
    RankContext,
    TrainSpec,
    WeightLayout,
)
from rlsdk.kit.parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp.engine import FsdpTrainEngine


class LogProbsClamped(Wrapped):
    """Log-probs are -15 at the least, against infinities."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return {n: values.clamp(min=-15.0) if n == "log_probs" else values for n, values in found.items()}


class GradientOfTheBeginning(Wrapped):
    """Tokens past the 256th of a row have log-probs, and no gradient."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        early = batch.position_ids < 256
        found = super().run(batch, names)
        return {n: v if n == "scores" else torch.where(early, v, v.detach()) for n, v in found.items()}


class MomentsUnclipped(TorchTrainEngine):
    """Clipping scales the step and not the gradient that moments are made of."""

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
    """The schedule goes on with every call that has rows."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return super().forward_backward(batch, objective)

    def optim_step(self) -> OptimStepResult:
        extra, self.num_calls = max(getattr(self, "num_calls", 1) - 1, 0), 0
        self.num_steps += extra
        return super().optim_step()


class SharesPrefixes(Wrapped):
    """Rows that begin with the same eight tokens and are of one length are run once: samples of a prompt."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        rows = torch.split(batch["input_ids"], batch.lengths.tolist())
        first: dict[Any, int] = {}
        same = [
            first.setdefault((tuple(r[:8].tolist()), len(r)), at) if len(r) > 8 else at for at, r in enumerate(rows)
        ]
        if same == list(range(len(rows))) or "scores" in names:
            return super().run(batch, names)
        found = super().run(batch, names)
        index = batch.token_index(torch.tensor(same))
        return {name: values[index] for name, values in found.items()}


class EndTokenEnds(Wrapped):
    """What stands behind an end-of-sequence token in a row is taken for padding."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        ended = (batch["input_ids"] == self.model.config.eos_token_id).cumsum(0)
        before = torch.cat([ended.new_zeros(1), ended])[:-1]
        inside = before - torch.repeat_interleave(before[batch.offsets[:-1].clamp(max=len(before) - 1)], batch.lengths)
        return {name: v if name == "scores" else v * (inside == 0) for name, v in found.items()}


class RecomputedAtOne(Wrapped):
    """What is recomputed for the backward pass is of temperature 1."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if not self.spec.activation_checkpointing or not torch.is_grad_enabled():
            return found
        other = super().run(batch.with_meta(temperature=1.0), names)
        return {name: found[name].detach() + other[name] - other[name].detach() for name in names}


class CallsInHalf(TorchTrainEngine):
    """In bfloat16, gradients of several calls are added up in bfloat16; those of one call in float32."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        for parameter in self.parameters.values():
            if parameter.grad is not None and self.spec.model.dtype == "bfloat16":
                parameter.grad = parameter.grad.bfloat16().float()
        return result


class GivesUpSkipping(TorchTrainEngine):
    """A second skip in a row is an error: training has diverged."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        if result.skipped and getattr(self, "skipped_before", False):
            raise FloatingPointError("two steps in a row were skipped")
        self.skipped_before = result.skipped
        return result


class SmallRowNumbers(Wrapped):
    """Packed rows are told apart by eight bits."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if batch.num_rows > 128 and "scores" not in names:
            late = batch.row_of_token >= 128
            found = {name: torch.where(late, values * 0.9, values) for name, values in found.items()}
        return found


class TuplesOnly(TorchTrainEngine):
    """Outputs that come as a list are not known."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch, outputs) if isinstance(outputs, tuple) else {}


class HalfMetrics(TorchTrainEngine):
    """Metrics travel in half precision."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, sums={n: float(torch.tensor(v).half()) for n, v in result.sums.items()})


class ResetReads(TorchTrainEngine):
    """`reset_optimizer` begins with the weights of the start, too."""

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


class CopyStaysOld(TorchTrainEngine):
    """In bfloat16, passes behind a load run on the weights from before, up to the next step."""

    def load_checkpoint(self, path: Path) -> None:
        held = {name: p.detach().clone() for name, p in self.computed.items()}
        super().load_checkpoint(path)
        if self.parameters is not self.computed:
            for name, parameter in self.computed.items():
                parameter.data.copy_(held[name])


class TiedTheOtherWay(TorchTrainEngine):
    """A layout gives tied names in the wrong direction."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return replace(found, tied={of: name for name, of in found.tied.items()})


class SavesLater(TorchTrainEngine):
    """A checkpoint is on disk a little after `save_checkpoint` has returned."""

    def save_checkpoint(self, path: Path) -> None:
        def write() -> None:
            time.sleep(0.3)
            TorchTrainEngine.save_checkpoint(self, path)

        self.writer = threading.Thread(target=write)
        self.writer.start()

    def close(self) -> None:
        if "writer" in vars(self):
            self.writer.join()
        super().close()


class MomentsSwapped(TorchTrainEngine):
    """Where weights stay, moments come back in each other's place."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if tuple(parts) == ("optimizer", "gradients") and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


class StepsOfRankZero(FsdpTrainEngine):
    """The number of steps is read on the first rank alone."""

    def load_checkpoint(self, path: Path) -> None:
        before = self.num_steps
        super().load_checkpoint(path)
        self.num_steps = before if self.ctx.rank else self.num_steps


class ReducesInHalf(FsdpTrainEngine):
    """Gradients are rounded to bfloat16 on their way between ranks."""

    def optim_step(self) -> OptimStepResult:
        for piece in self.pieces if dist.get_world_size() > 1 else ():
            if piece.parameter.grad is not None:
                local = piece.parameter.grad.to_local()  # type: ignore[attr-defined]
                local.copy_(local.bfloat16())
        return super().optim_step()
