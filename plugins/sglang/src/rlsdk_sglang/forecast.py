"""What the backend would hold, worked out without SGLang: for `rlsdk plan`."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Forecast,
    RankContext,
    RankMemory,
    RolloutSpec,
    TrainSpec,
    WeightLayout,
    Workload,
)
from rlsdk.kit.forecast import ModelTensors, cache_bytes, rollout
from rlsdk.kit.hf import load_model_config
from rlsdk.kit.worker_forecast import worker_layouts
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.launch import MAX_SHARE, RESERVED_TOKENS

FRONT_BYTES, SCHEDULER_BYTES = 150 << 20, 450 << 20
"""Main memory of SGLang's modules in the worker, and of each of its schedulers. Proportional set sizes of SGLang 0.5.23
on a CPU; see docs/benchmarks.md."""


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`. On a GPU SGLang takes its static share of the device; on a CPU room for all running samples, up
    to a share of the memory (here: of all, there: of what is free). What a server of the user's own keeps is not known.
    """
    spec = rollout(spec, "sglang")
    options = spec.options if isinstance(spec.options, SglangOptions) else SglangOptions()
    tensors = ModelTensors.read(spec)
    weights = tensors.replica_numel(spec) * DTYPE_BYTES[spec.model.dtype]
    cache: int | None = None
    if options.url is None:
        cache = options.kv_cache_mb << 20 if options.kv_cache_mb is not None else cache_bytes(
            contexts[0],
            spec,
            workload,
            weights_bytes=weights,
            sample_tokens=spec.max_model_tokens + RESERVED_TOKENS,
            gpu_share=options.memory_share,
            host_share=MAX_SHARE,
        )  # fmt: skip
    # What a pass takes is not counted: on a GPU it lies outside of the static share, which is small for that reason.
    processes = 0 if options.url is not None else SCHEDULER_BYTES + FRONT_BYTES // spec.num_devices
    memory = RankMemory(weights_bytes=weights, cache_bytes=cache, cache_stays=True, process_bytes=processes)
    own = options.url is None
    layouts = tuple(_layouts(tensors, ctx, spec, own_server=own) for ctx in contexts)
    return Forecast(layouts=layouts, memory=(memory,) * len(contexts))


def _layouts(
    tensors: ModelTensors, ctx: RankContext, spec: RolloutSpec, *, own_server: bool
) -> tuple[WeightLayout, ...]:
    """Of each scheduler, where it takes its own part and it is known how that is cut; else of the replica."""
    if own_server and spec.ep_size in (1, spec.num_devices):
        parts = worker_layouts(tensors, load_model_config(spec.model), ctx, spec, on_their_nodes=True)
        if parts is not None:
            return parts
    return (tensors.layout_of_replica(ctx, spec, on_host=True),)
