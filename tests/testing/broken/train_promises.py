"""Train engines that break what the interface promises of places, forms of results, and engines beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    ConfigError,
    ForwardBackwardResult,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    TrainSpec,
    WeightLayout,
)
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp.engine import FsdpTrainEngine


class OneClip(TorchTrainEngine):
    """The limit of the gradient's norm is that of the last engine that was built in the process."""

    limit: ClassVar[float | None] = None

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.optim is not None:
            OneClip.limit = spec.optim.max_grad_norm

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        self.optim = replace(self.optim, max_grad_norm=OneClip.limit)
        return super().optim_step()


class LossIsATensor(TorchTrainEngine):
    """Results are tensors."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, loss=torch.tensor(result.loss))  # type: ignore[arg-type]


class MasksInPlace(TorchTrainEngine):
    """Tokens off the mask are zeroed in the batch itself."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        if "advantages" in batch:
            batch["advantages"].mul_(0)
        return found


class OutputsWithMore(TorchTrainEngine):
    """Entropy comes along, asked for or not."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return found | ({"entropy": torch.zeros(batch.num_tokens)} if "log_probs" in outputs else {})


class NodeUnknown(TorchTrainEngine):
    """The layout's node is a name of its own."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), node="here")


class SeedOfItsOwn(TorchTrainEngine):
    """Random weights are always the same ones."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, seed=1), spec)


class RecomputesNothing(TorchTrainEngine):
    """`activation_checkpointing` is not read."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, replace(spec, activation_checkpointing=False))


class MaskedIsAll(TorchTrainEngine):
    """A mask without a token is taken for none."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        mask = batch.tokens.get("response_mask")
        if mask is not None and not bool(mask.any()):
            batch = replace(batch, tokens={n: t for n, t in batch.tokens.items() if n != "response_mask"})
        return super().forward(batch, outputs)


class AnySchedule(TorchTrainEngine):
    """A schedule that there is not is a constant one."""

    def reset_optimizer(self, optim: object) -> None:
        assert isinstance(optim, OptimSpec)
        try:
            super().reset_optimizer(optim)
        except ConfigError:
            super().reset_optimizer(replace(optim, schedule="constant"))


class MarksTheFolder(TorchTrainEngine):
    """A checkpoint that was loaded says so."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        (path / "loaded").touch()


class EveryRankIsFirst(FsdpTrainEngine):
    """Every rank stands at the first position."""

    @property
    def parallel(self) -> Parallel:
        return replace(super().parallel, dp_rank=0) if self.spec.micro_batch_rows else super().parallel


class WaitsInLayout(FsdpTrainEngine):
    """`layout` waits for the other ranks."""

    def layout(self) -> WeightLayout:
        torch.distributed.all_reduce(torch.zeros(3))
        return super().layout()


class ResetsOne(FsdpTrainEngine):
    """The schedule begins again on rank 0 alone."""

    def reset_optimizer(self, optim: object) -> None:
        steps = getattr(self, "num_steps", 0)
        super().reset_optimizer(optim)
        if self.ctx.rank:
            self.num_steps = steps


class StaysInGroup(FsdpTrainEngine):
    """`close` leaves the process group as it is."""

    def close(self) -> None:
        vars(self).clear()


class RaisesAlone(FsdpTrainEngine):
    """What an objective raises on one rank is swallowed on the others."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except Exception as error:
            if type(error).__name__ == "RaisedHereError":
                raise
            return ForwardBackwardResult(loss=0.0)


class ForecastUntied(TorchTrainEngine):
    """What it holds is not what its backend forecasts."""

    def layout(self) -> WeightLayout:
        layout = super().layout()
        return replace(layout, boxes=layout.boxes[::-1])

    def shards(self) -> Any:
        return iter([*super().shards()][::-1])
