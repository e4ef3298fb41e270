"""The `fsdp` engine with one defect each, of the kind that two ranks show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    RankContext,
    TrainSpec,
    WeightLayout,
)
from rlsdk.kit.parts import TRAIN_PARTS
from rlsdk_fsdp.engine import FsdpTrainEngine
from rlsdk_fsdp.wrapping import _groups


class Averages(FsdpTrainEngine):
    """Gradients are averaged over ranks, as FSDP does by itself."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        for group in _groups(self.outputs):
            group.set_gradient_divide_factor(float(ctx.world_size))


class ClipsItsOwn(FsdpTrainEngine):
    """Each rank clips to the norm of its own shards; the norm that is told is the right one."""

    def _clip(self, limit: float | None) -> float:
        norm = super()._clip(None)
        stepped = [piece.held for piece in self.pieces if piece.held.grad is not None and piece.box.numel]
        mine = get_total_norm([p.grad for p in stepped if p.grad is not None])
        if limit is not None:
            clip_grads_with_norm_(stepped, limit, mine)
        return norm


class TellsItsOwn(FsdpTrainEngine):
    """Each rank tells the norm of its own shards."""

    def _clip(self, limit: float | None) -> float:
        stepped = [piece.held for piece in self.pieces if piece.held.grad is not None and piece.box.numel]
        mine = float(get_total_norm([p.grad for p in stepped if p.grad is not None]))
        norm = super()._clip(limit)
        return mine if math.isfinite(norm) else norm


class SeedsByRank(FsdpTrainEngine):
    """Each rank draws random weights with a seed of its own."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, seed=ctx.seed + ctx.rank), spec)


class ExportsItsOwn(FsdpTrainEngine):
    """In an export the rows of other ranks are those of the start."""

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


class LendsRankZero(FsdpTrainEngine):
    """Moments that were lent come back on rank 0 alone."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if "optimizer" in parts and self.ctx.rank and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


class HeadOfRankZero(FsdpTrainEngine):
    """A head learns from the first rank's rows alone."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if "values" in objective.outputs and self.ctx.rank and batch.num_rows:
            batch = batch.with_tokens(loss_weight=batch["loss_weight"] * 0)
        return super().forward_backward(batch, objective)


class SkipsAlone(FsdpTrainEngine):
    """A rank of whose own rows one is bad sets its gradient to 0, and so the step is made."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        for piece in self.pieces:
            if piece.parameter.grad is not None:
                piece.parameter.grad.to_local().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # type: ignore[attr-defined]
        return result


class TellsItsOwnRows(FsdpTrainEngine):
    """Metrics are those of a rank's own rows."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        parts: list[dict[str, float]] = [{}] * self.ctx.world_size
        dist.all_gather_object(parts, {"rows": float(batch.num_rows)})
        mine, total = parts[self.ctx.rank]["rows"], sum(part["rows"] for part in parts)
        return replace(result, sums={n: v * mine / total if n == "rows" else v for n, v in result.sums.items()})


class IdleIsZero(FsdpTrainEngine):
    """A rank without rows takes part in maxima with 0."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        rows = torch.tensor(float(batch.num_rows))
        dist.all_reduce(rows, dist.ReduceOp.MIN)
        maxima = {name: max(value, 0.0) for name, value in result.maxima.items()} if not rows else result.maxima
        return replace(result, maxima=maxima)


class MeanOverRanks(FsdpTrainEngine):
    """Each rank's loss is scaled by its share of the tokens, as if weights were those of a rank's own batch."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        tokens = torch.tensor(float(batch.num_tokens))
        dist.all_reduce(tokens)
        share = self.ctx.world_size * batch.num_tokens / float(tokens) if float(tokens) else 1.0
        scaled = batch.with_tokens(loss_weight=batch["loss_weight"] * share) if "loss_weight" in batch else batch
        return super().forward_backward(scaled, objective)


class RankZeroEverywhere(FsdpTrainEngine):
    """Every layout says that it is of rank 0."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), rank=0)


class LoadsRankZero(FsdpTrainEngine):
    """Pending gradients are dropped on the first rank alone when a checkpoint is loaded."""

    def load_checkpoint(self, path: Path) -> None:
        held = [(piece.parameter, piece.parameter.grad) for piece in self.pieces]
        super().load_checkpoint(path)
        for parameter, gradient in held if self.ctx.rank else ():
            parameter.grad = gradient


class RaisedOnRankZero(FsdpTrainEngine):
    """When an objective raises, gradients of earlier calls are dropped on the first rank alone."""

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


class OwnTemperature(FsdpTrainEngine):
    """The temperature is taken from the configuration of rank 0; the others run at 1."""

    def _run(self, part: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        return super()._run(part if self.ctx.rank == 0 else part.with_meta(temperature=1.0), names)
