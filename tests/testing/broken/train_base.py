"""Base classes of broken train engines: what their defects replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlsdk.interfaces import Batch, Objective, ObjectiveResult, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine


class Wrapped(TorchTrainEngine):
    """Base: passes go through `run`, with gradient and without."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.plain = self.outputs
        self.outputs = lambda batch, names: self.run(batch, names)  # type: ignore[assignment]

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.plain(batch, names)
        return found


class Through:
    """Base: replaces the objective and its results."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.whole_groups = getattr(objective, "whole_groups", False)

    @property
    def outputs(self) -> Sequence[str]:
        return self.objective.outputs

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        return self.objective(outputs, batch)
