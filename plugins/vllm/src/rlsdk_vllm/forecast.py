"""What the backend would hold, worked out without vLLM: for `rlsdk plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from rlsdk.kit.hf import build_model, canonical_parameters, load_model_config
from rlsdk.kit.kv_cache import bytes_per_token
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.memory import BLOCK_TOKENS, MAX_SHARE


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`. On a GPU vLLM takes its share of the device, whatever the model leaves of that for keys and
    values; on a CPU, room for all running samples, up to a share of the memory (here: of all, there: of what is free).
    """
    if not isinstance(spec, RolloutSpec):
        raise ConfigError(f"backend 'vllm' is a rollout backend; got a {type(spec).__name__}")
    options = spec.options if isinstance(spec.options, VllmOptions) else VllmOptions()
    parameters, tied = canonical_parameters(build_model(spec.model, empty=True))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    layouts = [_layout(ctx, spec, shapes, tied) for ctx in contexts]
    weights = sum(map(math.prod, shapes.values())) * DTYPE_BYTES[spec.model.dtype] // spec.tp_size
    memory = RankMemory(
        weights_bytes=weights,
        cache_bytes=_cache_bytes(contexts[0], spec, options, workload, weights),
        cache_stays=True,
        # What a pass takes is inside vLLM's own share of a GPU; on a CPU it is small and not counted.
        forward_bytes=0,
    )
    return Forecast(layouts=tuple((layout,) for layout in layouts), memory=(memory,) * len(contexts))


def _layout(
    ctx: RankContext, spec: RolloutSpec, shapes: dict[str, tuple[int, ...]], tied: dict[str, str]
) -> WeightLayout:
    """As the engine's own: whole tensors, whatever it makes of them inside."""
    return WeightLayout(
        rank=0,
        node=ctx.node,
        device=ctx.device,
        process="",
        tensors=tuple(TensorMeta(name=n, shape=shape, dtype=spec.model.dtype) for n, shape in shapes.items()),
        boxes=tuple((name, Box.whole(shape)) for name, shape in shapes.items()),
        tied=tied,
    )


def _cache_bytes(
    ctx: RankContext, spec: RolloutSpec, options: VllmOptions, workload: Workload, weights_bytes: int
) -> int | None:
    """On one device."""
    if options.kv_cache_mb is not None:
        return options.kv_cache_mb << 20
    if ctx.device != "cpu":
        if workload.device_bytes is None:
            return None
        return max(int(workload.device_bytes * options.gpu_memory_utilization) - weights_bytes, 0)
    blocks = -(-spec.max_model_tokens // BLOCK_TOKENS) + 1
    one = blocks * BLOCK_TOKENS * bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    room = one * spec.max_running
    return max(room if workload.device_bytes is None else min(room, int(workload.device_bytes * MAX_SHARE)), one)
