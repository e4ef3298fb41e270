"""Builds what an engine holds: this rank's stages and their parameters, with values, and the adapter beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.interfaces import ConfigError, RankContext, TrainSpec
from rlsdk.kit.model.hf import build_model, canonical_parameters
from rlsdk.kit.model.microbatch import check_limits
from rlsdk_megatron.adapter import SplitAdapter, split_adapter
from rlsdk_megatron.config import MegatronOptions, split_problems
from rlsdk_megatron.loading import load_weights
from rlsdk_megatron.modeling import (
    Stage,
    buffers_of,
    build_stages,
    keep_shared,
    make_trainable,
    transformer_config,
    uses_transformer_engine,
)
from rlsdk_megatron.parts import Held, Shapes, held_by


@dataclass(frozen=True)
class Built:
    """One rank's part of a model."""

    stages: Sequence[Stage]
    modules: Sequence[Any]
    """The stages, wrapped for training if they are trained."""
    exported: Any
    """The transformers configuration of the whole model."""
    held: Sequence[Held]
    """Its own weights."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all canonical tensors of the model."""
    tied: Mapping[str, str]
    """Other names of a tensor -> its canonical name."""
    adapter: SplitAdapter | None


def build(ctx: RankContext, spec: TrainSpec, options: MegatronOptions, hf_config: Any, device: torch.device) -> Built:
    """Collective: every rank must call."""
    empty = build_model(spec.model, empty=True)
    named, tied = canonical_parameters(empty)
    config = transformer_config(hf_config, spec, options, device)
    engine = uses_transformer_engine(options, device)
    stages = build_stages(config, hf_config, spec.model.head, engine=engine, tied="lm_head.weight" in tied)
    shapes = Shapes.of(config, {name: tuple(p.shape) for name, p in named.items()})
    held = held_by(stages, shapes, tied)
    trained = spec.optim is not None
    for stage in stages:
        stage.requires_grad_(trained).train(trained)
    adapter = split_adapter(spec, stages, held, shapes, device, engine=engine)
    # `make_trainable` moves parameters into buffers, so values come after it.
    modules: Sequence[Any] = make_trainable(config, stages, options) if trained else stages
    if device.type == "cpu":
        keep_shared(stages, [buffer for module in modules if trained for buffer in buffers_of(module)])
    load_weights(held, empty, spec.model, seed=ctx.seed, random=spec.init_from_config)
    if adapter is not None:
        adapter.fill(ctx.seed)
    return Built(stages, modules, empty.config, held, shapes.shapes, tied, adapter)


def options_of(spec: TrainSpec) -> MegatronOptions:
    """Options of the backend; its defaults if there are none."""
    if spec.options is None:
        return MegatronOptions()
    if not isinstance(spec.options, MegatronOptions):
        raise ConfigError(
            f"TrainSpec.options is a {type(spec.options).__name__}; backend 'megatron' expects an "
            "rlsdk_megatron.config:MegatronOptions, or None for its defaults"
        )
    return spec.options


def check(ctx: RankContext, spec: TrainSpec, options: MegatronOptions, model: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a split, a dtype or limits of micro-batches that cannot run."""
    device = torch.device(ctx.device).type
    problems = list(split_problems(options, num_ranks=ctx.world_size, device=device, model=model))
    if problems:
        raise ConfigError("; ".join(f"train.megatron.{name}: {message}" for name, message in problems))
    if spec.optim is not None and spec.model.dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"model.dtype {spec.model.dtype!r}: backend 'megatron' trains in 'float32' or 'bfloat16'; float16 "
            "gradients underflow without loss scaling"
        )
    check_limits(spec)
