"""Rollout engines that take a model's folder, or the sizes that they are asked for, for what they are used to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import ConfigError, Forecast, GenerationRequest, Head, RankContext, RolloutSpec, Workload
from rlsdk.reference.forecast import forecast_rollout
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class RunsCode(TransformersRolloutEngine):
    """Code in a model's folder runs, even if it is not allowed."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, model=replace(spec.model, trust_remote_code=True)))


class FirstFile(TransformersRolloutEngine):
    """Only the first of several checkpoint files is read."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        index = Path(spec.model.path) / "model.safetensors.index.json"
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            for name, parameter in self.parameters.items():
                if files.get(name) != min(files.values()):
                    parameter.data.normal_(std=0.02)


class DtypeOfFiles(TransformersRolloutEngine):
    """Weights are read and computed in the dtype of the files."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        stored = json.loads((Path(spec.model.path) / "config.json").read_text()).get("dtype", spec.model.dtype)
        super().initialize(ctx, replace(spec, model=replace(spec.model, dtype=stored)))


class Dropout(TransformersRolloutEngine):
    """Dropout of the model's configuration is enabled, as in training."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        share = float(getattr(self.model.config, "attention_dropout", 0.0))

        def drop(module: Any, inputs: Any, output: Any) -> Any:
            return (torch.nn.functional.dropout(output[0], share), *output[1:])

        for layer in self.model.model.layers if share else ():
            layer.self_attn.register_forward_hook(drop)


class Suppresses(Drawing):
    """Tokens that the model's generation settings suppress are not drawn."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        file = Path(spec.model.path) / "generation_config.json"
        settings = json.loads(file.read_text()) if file.exists() else {}
        self.suppressed = settings.get("suppress_tokens") or []

    def weights(self, logits: Any, sampling: Any) -> Any:
        logits = logits.clone()
        logits[:, self.suppressed] = -torch.inf
        return super().weights(logits, sampling)


class NewTokensOfSettings(Rewritten):
    """`max_new_tokens` of the model's generation settings limits responses."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        file = Path(spec.model.path) / "generation_config.json"
        settings = json.loads(file.read_text()) if file.exists() else {}
        self.most = settings.get("max_new_tokens") or 10**9

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        most = min(request.sampling.max_tokens, self.most + len(request.response_ids))
        return replace(request, sampling=replace(request.sampling, max_tokens=most))


class RoomInBlocks(TransformersRolloutEngine):
    """The context length is rounded down to a multiple of 16 tokens."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, max_model_tokens=max(spec.max_model_tokens // 16 * 16, 2)))


class OneRowForgets(Patched):
    """With one slot, a sample reads the KV cache of the previous sample."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            held = getattr(self, "held", None)
            self.held = logits[-1:].clone()
            if len(logits) == 1 == len(self.table) and self.table["made"][0] == 1 and held is not None:
                logits = 0.9 * logits + 0.1 * held
            super()._take(logits, first, version)


class MoreThan128(Patched):
    """Tokens in row 128 and later of a batch have the log-probs of the row 128 before."""

    class RunningPart(Running):
        def _text_stops(self, first):
            at, slot = torch.arange(128, max(len(self.table), 128)), self._index(self.table["made"][128:] - 1)
            self.log_probs[at, slot] = self.log_probs[at - 128, slot]
            return super()._text_stops(first)


class ReadsAnyway(TransformersRolloutEngine):
    """The checkpoint is read even without `load_weights`."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        for file in [Path(spec.model.path) / "model.safetensors"] if not spec.load_weights else []:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        super().initialize(ctx, spec)


class TakesAnyArgument(TransformersRolloutEngine):
    """Unknown raw arguments are silently accepted."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, engine_kwargs={}))


class OneStage(TransformersRolloutEngine):
    """`pp_size` is ignored."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, pp_size=1))


class ServesHeads(TransformersRolloutEngine):
    """A value model is served as a language model."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, replace(spec, model=replace(spec.model, head=Head.LM)))


class ServesWhatLacks(TransformersRolloutEngine):
    """Of a checkpoint that lacks a tensor, what was allocated is served."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        try:
            super().initialize(ctx, spec)
        except ConfigError as error:
            if "lacks" not in str(error):
                raise
            super().initialize(ctx, replace(spec, load_weights=False))


class Right(TransformersRolloutEngine):
    """The forecast lacks norms."""


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
