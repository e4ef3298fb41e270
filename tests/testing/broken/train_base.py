"""Base classes of broken train engines: what their defects replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlsdk.interfaces import Batch, Objective, ObjectiveResult, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine


class OtherPasses:
    """The module of an engine whose passes another function computes, from what was sent and without its plan."""

    def __init__(self, outputs: Any, run: Callable[[Batch, Sequence[str]], dict[str, Tensor]]) -> None:
        self._outputs = outputs
        self._run = run

    def __call__(self, batch: Batch, names: Sequence[str], *, plan: object = None) -> dict[str, Tensor]:
        return self._run(batch, names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outputs, name)


class Wrapped(TorchTrainEngine):
    """Base: passes go through `run`, with gradient and without."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.plain = self.outputs
        self.outputs = OtherPasses(self.plain, self.run)  # type: ignore[assignment]

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
