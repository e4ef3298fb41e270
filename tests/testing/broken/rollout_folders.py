"""Rollout engines that take a model's folder, or the sizes that they are asked for, for what they are used to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from broken.defect import defect
from rlsdk.interfaces import Forecast, Head, RankContext, RolloutSpec, Workload
from rlsdk.reference.forecast import forecast_rollout
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"model.tied": "code of the model was run"})
class RunsCode(TransformersRolloutEngine):
    """Code in a model's folder runs, even if it is not allowed."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, model=replace(spec.model, trust_remote_code=True)))


@defect({"model.configuration": "wrong samples"})
class DtypeOfFiles(TransformersRolloutEngine):
    """Weights are read and computed in the dtype of the files."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        stored = json.loads((Path(spec.model.path) / "config.json").read_text()).get("dtype", spec.model.dtype)
        super().initialize(ctx, replace(spec, model=replace(spec.model, dtype=stored)))


@defect({"model.configuration": "a prompt of 508 tokens"})
class RoomInBlocks(TransformersRolloutEngine):
    """The context length is rounded down to a multiple of 16 tokens."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, max_model_tokens=max(spec.max_model_tokens // 16 * 16, 2)))


@defect({"initialize.refusals": "an argument that"})
class TakesAnyArgument(TransformersRolloutEngine):
    """Unknown raw arguments are silently accepted."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, engine_kwargs={}))


@defect({"initialize.refusals": "pp_size 0"})
class OneStage(TransformersRolloutEngine):
    """`pp_size` is ignored."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, pp_size=1))


@defect({"initialize.refusals": "a value head"})
class ServesHeads(TransformersRolloutEngine):
    """A value model is served as a language model."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, model=replace(spec.model, head=Head.LM)))


def without_norms(contexts: Sequence[RankContext], spec: RolloutSpec, workload: Workload) -> Forecast:
    """The reference engine's forecast, less its norms."""
    found = forecast_rollout(contexts, spec, workload)
    layouts = [
        replace(
            layout,
            tensors=tuple(meta for meta in layout.tensors if "norm" not in meta.name),
            boxes=tuple((name, box) for name, box in layout.boxes if "norm" not in name),
        )
        for (layout,) in found.layouts
    ]
    return replace(found, layouts=tuple((layout,) for layout in layouts))


@defect({"forecast": "differences from layout 0"}, forecast=without_norms)
class ForecastWithoutNorms(TransformersRolloutEngine):
    """The forecast lacks norms."""
