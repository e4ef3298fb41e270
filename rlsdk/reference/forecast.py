"""What the built-in engines would hold: for `rlsdk plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    ConfigError,
    Forecast,
    RankContext,
    RankMemory,
    RolloutSpec,
    TensorMeta,
    TrainSpec,
    WeightLayout,
    Workload,
)
from rlsdk.kit.estimate import key_value_bytes, pass_bytes, rows_of_pass
from rlsdk.kit.hf import build_model, canonical_parameters, load_model_config

DECODE_COPIES = 4
"""Of a step's float32 logits: as they come, scaled, as log-probs, and sorted or summed up for the draw."""


def whole_layout(ctx: RankContext, spec: TrainSpec | RolloutSpec, dtype: str) -> WeightLayout:
    """Of a rank that holds every tensor whole."""
    parameters, tied = canonical_parameters(build_model(spec.model, empty=True))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return WeightLayout(
        rank=ctx.rank,
        node=ctx.node,
        device=ctx.device,
        process="",
        tensors=tuple(TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()),
        boxes=tuple((name, Box.whole(shape)) for name, shape in shapes.items()),
        tied=tied,
    )


def forecast_training(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """Of the backend `torch`: one process, float32 weights, and a rounded copy where passes run in another dtype."""
    if not isinstance(spec, TrainSpec):
        raise ConfigError(f"backend 'torch' is a train backend; got a {type(spec).__name__}")
    trained = spec.optim is not None
    layout = whole_layout(contexts[0], spec, "float32" if trained else spec.model.dtype)
    numel = sum(math.prod(meta.shape) for meta in layout.tensors)
    width = DTYPE_BYTES[spec.model.dtype]
    copied = trained and spec.model.dtype != "float32"
    rows, _ = rows_of_pass(spec, row_tokens=workload.row_tokens, num_rows=workload.update_rows)
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    forward = pass_bytes(spec.model, dtype=dtype, num_rows=rows, row_tokens=workload.row_tokens, gradient=False)
    backward = 0 if not trained else pass_bytes(
        spec.model,
        dtype=dtype,
        num_rows=rows,
        row_tokens=workload.row_tokens,
        gradient=True,
        activation_checkpointing=spec.activation_checkpointing,
    )  # fmt: skip
    return Forecast(
        layouts=((layout,),),
        memory=(
            RankMemory(
                weights_bytes=numel * (4 if trained else width) + numel * width * copied,
                optimizer_bytes=numel * 8 * trained,
                gradients_bytes=numel * 4 * trained,
                forward_bytes=forward,
                # The rounded copy has gradients of its own until the micro-batch ends.
                backward_bytes=None if backward is None else backward + numel * width * copied,
            ),
        ),
    )


def forecast_rollout(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """Of the backend `transformers`: a whole copy in each process, keys and values while there are requests."""
    if not isinstance(spec, RolloutSpec):
        raise ConfigError(f"backend 'transformers' is a rollout backend; got a {type(spec).__name__}")
    config = load_model_config(spec.model)
    layouts = [whole_layout(ctx, spec, spec.model.dtype) for ctx in contexts]
    numel = sum(math.prod(meta.shape) for meta in layouts[0].tensors)
    rows = min(workload.running_rows, spec.max_running)
    memory = RankMemory(
        weights_bytes=numel * DTYPE_BYTES[spec.model.dtype],
        forward_bytes=DECODE_COPIES * rows * int(config.get_text_config().vocab_size) * 4,
        cache_bytes=rows * workload.row_tokens * key_value_bytes(config, spec.model.dtype),
    )
    return Forecast(layouts=tuple((layout,) for layout in layouts), memory=(memory,) * len(contexts))
