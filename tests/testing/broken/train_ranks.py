"""Train engines that are wrong on several ranks: most are the `fsdp` engine with one defect each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from broken.defect import defect
from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    OptimStepResult,
    Parallel,
    RankContext,
    TrainSpec,
    WeightLayout,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.model.hf import persistent_buffers
from rlsdk.kit.model.pass_plan import PassPlan
from rlsdk.kit.ranks.metric_sums import MetricSums
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp import engine as fsdp
from rlsdk_fsdp.engine import FsdpTrainEngine
from rlsdk_fsdp.wrapping import _groups


@defect({"refusals": "2 ranks"})
class AnySize(TorchTrainEngine):
    """A world of two ranks is two independent engines."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, rank=0, world_size=1), spec)


@defect({"ranks.settings": "gradient norm"}, ranks=True)
class Averages(FsdpTrainEngine):
    """Gradients are averaged over ranks, as FSDP does by default."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        for group in _groups(self.outputs):
            group.set_gradient_divide_factor(float(ctx.world_size))


@defect({"ranks.initial": "random"}, ranks=True)
class SeedsByRank(FsdpTrainEngine):
    """Each rank draws random weights with its own seed."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, seed=ctx.seed + ctx.rank), spec)


@defect({"ranks.export": "weights"}, ranks=True)
class ExportsItsOwn(FsdpTrainEngine):
    """An export has the initial rows of other ranks."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.first = {piece.name: piece.held.detach().clone() for piece in self.pieces}

    def save_pretrained(self, path: Path) -> None:
        held = {piece.name: piece.held.detach().clone() for piece in self.pieces}
        with torch.no_grad():
            for piece in self.pieces if self.ctx.rank else ():
                piece.held.copy_(self.first[piece.name])
            super().save_pretrained(path)
            for piece in self.pieces:
                piece.held.copy_(held[piece.name])


@defect({"ranks.read_only": "weights"}, ranks=True)
class LendsRankZero(FsdpTrainEngine):
    """Offloaded moments are restored only on rank 0."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if "optimizer" in parts and self.ctx.rank and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


@defect({"ranks.heads": "values"}, ranks=True)
class HeadOfRankZero(FsdpTrainEngine):
    """A head learns only from the first rank's rows."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if "values" in objective.outputs and self.ctx.rank and batch.num_rows:
            batch = batch.with_tokens(loss_weight=batch["loss_weight"] * 0)
        return super().forward_backward(batch, objective)


@defect({"ranks.skipped": "was not skipped"}, ranks=True)
class SkipsAlone(FsdpTrainEngine):
    """A rank with a bad row sets its gradient to 0, and the step is made."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        for piece in self.pieces:
            if piece.parameter.grad is not None:
                piece.parameter.grad.to_local().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # type: ignore[attr-defined]
        return result


@defect({"ranks.uneven_rows": "largest difference"}, ranks=True)
class MeanOverRanks(FsdpTrainEngine):
    """Each rank's loss is scaled by its share of the tokens, as if weights were per rank."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        tokens = torch.tensor(float(batch.num_tokens))
        dist.all_reduce(tokens)
        share = self.ctx.world_size * batch.num_tokens / float(tokens) if float(tokens) else 1.0
        scaled = batch.with_tokens(loss_weight=batch["loss_weight"] * share) if "loss_weight" in batch else batch
        return super().forward_backward(scaled, objective)


@defect({"ranks.layout": "number of another"}, ranks=True)
class RankZeroEverywhere(FsdpTrainEngine):
    """Every layout has rank 0."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), rank=0)


@defect({"ranks.raises": "weights"}, ranks=True)
class RaisedOnRankZero(FsdpTrainEngine):
    """When an objective raises, gradients of earlier calls are dropped only on the first rank."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        held = [
            (p.parameter, None if p.parameter.grad is None else p.parameter.grad.detach().clone()) for p in self.pieces
        ]
        try:
            return super().forward_backward(batch, objective)
        except Exception:
            for parameter, gradient in held if self.ctx.rank else ():
                parameter.grad = gradient
            raise


@defect({"ranks.settings": "temperature"}, ranks=True)
class OwnTemperature(FsdpTrainEngine):
    """Rank 0 uses the configured temperature; the others use 1."""

    def _run(self, part: Batch, plan: PassPlan, names: Sequence[str]) -> dict[str, Tensor]:
        return super()._run(part if self.ctx.rank == 0 else part.with_meta(temperature=1.0), plan, names)


@defect({"ranks.checkpoint_heads": "difference of weights"}, ranks=True)
class LeastStep(FsdpTrainEngine):
    """After a load, ranks take the minimum of AdamW's step counts of each tensor, including the 0 of ranks without rows
    of it."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        if self.optimizer is None:
            return
        states = [self.optimizer.state.get(piece.held) or {} for piece in self.pieces]
        steps = torch.tensor([float(state.get("step", 0.0)) for state in states])
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        for state, step in zip(states, steps.tolist(), strict=True):
            if state:
                state["step"].fill_(step)


@defect({"ranks.random_state": "numbers drawn"}, ranks=True)
class RandomStateOfRankZero(FsdpTrainEngine):
    """After a load all ranks have rank 0's random state."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


@defect({"ranks.initial": "difference from one rank, random"}, ranks=True)
class SeedOfTheWorld(FsdpTrainEngine):
    """Random initial weights depend on the number of ranks."""

    def initialize(self, ctx, spec):
        super().initialize(replace(ctx, seed=ctx.seed + ctx.world_size - 1), spec)


@defect({"ranks.whole_groups": "largest difference"}, ranks=True)
class EveryRankIsFirst(FsdpTrainEngine):
    """Every rank reports the first position."""

    @property
    def parallel(self) -> Parallel:
        return replace(super().parallel, dp_rank=0) if self.spec.micro_batch_rows else super().parallel


@defect({"ranks.not_collective": ""}, ranks=True)
class WaitsInLayout(FsdpTrainEngine):
    """`layout` waits for the other ranks."""

    def layout(self) -> WeightLayout:
        torch.distributed.all_reduce(torch.zeros(3))
        return super().layout()


@defect({"ranks.reset": "largest difference"}, ranks=True)
class ResetsOne(FsdpTrainEngine):
    """The schedule is reset only on rank 0."""

    def reset_optimizer(self, optim: object) -> None:
        steps = getattr(self, "num_steps", 0)
        super().reset_optimizer(optim)
        if self.ctx.rank:
            self.num_steps = steps


@defect({"ranks.close": "still in a process group"}, ranks=True)
class StaysInGroup(FsdpTrainEngine):
    """`close` does not leave the process group."""

    def close(self) -> None:
        vars(self).clear()


@defect({"ranks.raises_one": "raised nothing"}, ranks=True)
class RaisesAlone(FsdpTrainEngine):
    """An objective's exception on one rank is swallowed on the others."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except Exception as error:
            if type(error).__name__ == "RaisedHereError":
                raise
            return ForwardBackwardResult(loss=0.0)


@defect({"ranks.checkpoint": "weights"}, ranks=True)
class StepsOfRankZero(FsdpTrainEngine):
    """The number of steps is loaded only on the first rank."""

    def load_checkpoint(self, path: Path) -> None:
        before = self.num_steps
        super().load_checkpoint(path)
        self.num_steps = before if self.ctx.rank else self.num_steps


@defect({"ranks.gradient": "of a tensor"}, ranks=True)
class ReducesInHalf(FsdpTrainEngine):
    """Gradients are rounded to bfloat16 for communication between ranks."""

    def optim_step(self) -> OptimStepResult:
        for piece in self.pieces if dist.get_world_size() > 1 else ():
            if piece.parameter.grad is not None:
                local = piece.parameter.grad.to_local()  # type: ignore[attr-defined]
                local.copy_(local.bfloat16())
        return super().optim_step()


@defect({"ranks.metrics": "metric"}, ranks=True)
class SumsByPlace(FsdpTrainEngine):
    """Metrics are reduced over ranks as one vector, in each rank's own order of names."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        with patch.object(fsdp, "MetricSums", _VectorSums):
            return super().forward_backward(batch, objective)


class _VectorSums(MetricSums):
    def reduce(self, num_micro_batches: int) -> ForwardBackwardResult:
        found = [(self._loss, self._sums, self._maxima)] * dist.get_world_size()
        dist.all_gather_object(found, found[0])
        sums, maxima = (max((rank[at] for rank in found), key=len) for at in (1, 2))
        return ForwardBackwardResult(
            loss=math.fsum(float(rank[0]) for rank in found),
            sums={name: math.fsum(_place(rank[1], at, 0.0) for rank in found) for at, name in enumerate(sums)},
            maxima={name: max(_place(rank[2], at, -math.inf) for rank in found) for at, name in enumerate(maxima)},
            num_micro_batches=num_micro_batches,
        )


def _place(metrics: Mapping[str, Any], at: int, nothing: float) -> float:
    values = [float(value) for value in metrics.values()]
    return values[at] if at < len(values) else nothing


@defect({"ranks.infinite": "was not skipped"}, ranks=True)
class OwnOverflow(FsdpTrainEngine):
    """Each rank decides by its own shards whether the gradient is finite."""

    def optim_step(self) -> OptimStepResult:
        optimizer, spec = self._trained()
        lr = fsdp.learning_rate(self.num_steps, spec)
        for piece in self.pieces:
            piece.take_gradient()
        held = [piece.held.grad for piece in self.pieces if piece.held.grad is not None and piece.box.numel]
        finite = math.isfinite(float(get_total_norm(held)))
        norm = self._clip(spec.max_grad_norm)
        if finite:
            fsdp.set_learning_rate(optimizer, lr)
            optimizer.step()
            self.num_steps += 1
        self._drop_gradients()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)


@defect({"ranks.deadline": "seconds of a rank that waits"}, ranks=True)
class OwnDeadline(FsdpTrainEngine):
    """The process group is joined with half an hour in place of `timeout_s`."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, timeout_s=1800.0), spec)


@defect({"ranks.tied": "that a rank does not list"}, ranks=True)
class TiesOfTheFirst(FsdpTrainEngine):
    """Only the first rank lists the other names of tied tensors."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return found if found.rank == 0 else replace(found, tied={})


@defect({"ranks.buffers": "with other values"}, ranks=True)
class BuffersOfRankZero(FsdpTrainEngine):
    """Only the first rank has read the persistent buffers."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        for buffer in persistent_buffers(self.model).values() if ctx.rank else ():
            buffer.zero_()
