"""What the built-in engines would hold: for `rlsdk plan`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlsdk.interfaces import DTYPE_BYTES, Forecast, RankContext, RankMemory, RolloutSpec, TrainSpec, Workload
from rlsdk.kit.forecast import ModelTensors, count_passes, rollout, training
from rlsdk.kit.hf import load_model_config
from rlsdk.kit.kv_cache import bytes_per_token

DECODE_COPIES = 4
"""Of a step's float32 logits: as they come, scaled, as log-probs, and sorted or summed up for the draw."""


def forecast_training(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """Of the backend `torch`: one process, float32 weights, and a rounded copy where passes run in another dtype."""
    spec = training(spec, "torch")
    trained = spec.optim is not None
    tensors = ModelTensors.read(spec)
    width = DTYPE_BYTES[spec.model.dtype]
    # The rounded copy has gradients of its own until the micro-batch ends.
    copied = tensors.numel * width * (trained and spec.model.dtype != "float32")
    passes = count_passes(spec, workload, dp_size=1, dtype=getattr(torch, spec.model.dtype))
    memory = RankMemory(
        weights_bytes=tensors.numel * (4 if trained else width) + copied,
        optimizer_bytes=tensors.numel * 8 * trained,
        gradients_bytes=tensors.numel * 4 * trained,
        forward_bytes=passes.forward_bytes,
        backward_bytes=None if passes.backward_bytes is None else passes.backward_bytes + copied,
    )
    layout = tensors.layout(contexts[0], "float32" if trained else spec.model.dtype)
    return Forecast(layouts=((layout,),), memory=(memory,))


def forecast_rollout(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """Of the backend `transformers`: a whole copy in each process, keys and values while there are requests."""
    spec = rollout(spec, "transformers")
    tensors, config = ModelTensors.read(spec), load_model_config(spec.model)
    rows = min(workload.running_rows, spec.max_running)
    memory = RankMemory(
        weights_bytes=tensors.numel * DTYPE_BYTES[spec.model.dtype],
        forward_bytes=DECODE_COPIES * rows * int(config.get_text_config().vocab_size) * 4,
        cache_bytes=rows * workload.row_tokens * bytes_per_token(config, spec.model.dtype),
    )
    layouts = tuple((tensors.layout(ctx, spec.model.dtype),) for ctx in contexts)
    return Forecast(layouts=layouts, memory=(memory,) * len(contexts))
