"""Memory forecasts of the built-in engines, for `rlsdk plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rlsdk.interfaces import DTYPE_BYTES, Forecast, RankContext, RankMemory, RolloutSpec, TrainSpec, Workload
from rlsdk.kit.generation.serving import tensor_metas
from rlsdk.kit.memory.forecast import ModelTensors, adapter_numel, count_passes, rollout, training
from rlsdk.kit.memory.kv_cache import bytes_per_token
from rlsdk.kit.model.hf import build_model, load_model_config
from rlsdk.kit.weights.block_scales import scales_bytes
from rlsdk.reference.block_linear import block_scales

DECODE_COPIES = 4
"""Of a step's float32 logits: as they come, scaled, as log-probs, and sorted or summed up for the draw."""


def forecast_training(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """Of the backend `torch`: one process, float32 weights, and a rounded copy where passes run in another dtype."""
    spec = training(spec, "torch")
    trained = spec.optim is not None
    tensors, low = ModelTensors.read(spec), adapter_numel(spec.model)
    width, adapted = DTYPE_BYTES[spec.model.dtype], spec.model.adapter is not None
    trains_all = trained and not adapted
    # The rounded copy has its own gradients until the micro-batch ends.
    copied = tensors.numel * width * (trains_all and spec.model.dtype != "float32")
    stepped = low if adapted else tensors.numel
    dtype, device = getattr(torch, spec.model.dtype), contexts[0].device
    passes = count_passes(spec, workload, dp_size=1, dtype=dtype, device=device)
    memory = RankMemory(
        weights_bytes=tensors.numel * (4 if trains_all else width) + 4 * low + copied,
        optimizer_bytes=stepped * 8 * trained,
        gradients_bytes=stepped * 4 * trained,
        forward_bytes=passes.forward_bytes,
        backward_bytes=None if passes.backward_bytes is None else passes.backward_bytes + copied,
    )
    layout = tensors.layout(contexts[0], "float32" if trains_all else spec.model.dtype)
    return Forecast(layouts=((layout,),), memory=(memory,))


def forecast_rollout(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """Of the backend `transformers`: a whole copy in each process, keys and values while there are requests."""
    spec = rollout(spec, "transformers")
    model, config = build_model(spec.model, empty=True), load_model_config(spec.model)
    tensors = ModelTensors.of(model)
    scales = block_scales(model, tensors.shapes, spec)
    rows, width = min(workload.running_rows, spec.max_running), DTYPE_BYTES[spec.model.dtype]
    low = 4 * adapter_numel(spec.model)
    quantized = {name: math.prod(tensors.shapes[name]) for name in scales}
    # Each layer is multiplied out in float32, with the scale of each element beside it, and rounded.
    multiplied_out = max(quantized.values(), default=0) * (4 + 4 + width)
    memory = RankMemory(
        weights_bytes=(tensors.numel - sum(quantized.values())) * width
        + sum(quantized.values())
        + sum(scales_bytes(tensors.shapes[name], said.block) for name, said in scales.items())
        + low * spec.adapter_versions,
        forward_bytes=DECODE_COPIES * rows * int(config.get_text_config().vocab_size) * 4 + multiplied_out,
        cache_bytes=rows * workload.row_tokens * bytes_per_token(config, spec.model.dtype),
    )
    metas = tensor_metas(tensors.shapes, spec.model.dtype, tensors.dtypes, scales)
    layouts = tuple((replace(tensors.layout(ctx, spec.model.dtype), tensors=metas),) for ctx in contexts)
    return Forecast(layouts=layouts, memory=(memory,) * len(contexts), adapter_bytes=low)
