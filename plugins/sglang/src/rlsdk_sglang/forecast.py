"""Forecasts the backend's memory without SGLang, for `rlsdk plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from rlsdk.kit.memory.forecast import ModelTensors, adapter_numel, cache_bytes, rollout
from rlsdk.kit.memory.worker_forecast import worker_layouts
from rlsdk.kit.model.hf import load_model_config
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.launch import MAX_SHARE, RESERVED_TOKENS
from rlsdk_sglang.low_rank import adapter_slots

FRONT_BYTES, SCHEDULER_BYTES = 150 << 20, 450 << 20
"""Host memory in bytes of SGLang's modules in the worker, and of each of its schedulers. Proportional set sizes of
SGLang 0.5.23 on a CPU; see docs/benchmarks.md."""
CONTEXT_BYTES, GRAPH_BYTES = 512 << 20, 1 << 30
"""Device memory that stays while the engine sleeps: a scheduler's context, and captured graphs. Common figures, not
measured."""


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`. On a GPU SGLang takes its static share of the device. On a CPU the KV cache has room for all
    running samples, up to a share of host memory (the forecast takes this share of all memory, the engine of free
    memory). The KV cache of a separately started server is not known."""
    spec = rollout(spec, "sglang")
    options = spec.options if isinstance(spec.options, SglangOptions) else SglangOptions()
    adapter_slots(spec, options)
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
    # Activations are not counted: on a GPU they use memory outside the static share, which leaves room for them.
    processes = 0 if options.url is not None else SCHEDULER_BYTES + FRONT_BYTES // spec.num_devices
    memory = RankMemory(weights_bytes=weights, cache_bytes=cache, cache_stays=True, process_bytes=processes)
    own = options.url is None
    if own and contexts[0].device != "cpu":
        memory = replace(memory, asleep_bytes=CONTEXT_BYTES + GRAPH_BYTES * options.cuda_graphs)
    layouts = tuple(_layouts(tensors, ctx, spec, own_server=own) for ctx in contexts)
    low = adapter_numel(spec.model) * DTYPE_BYTES[spec.model.dtype]
    return Forecast(layouts=layouts, memory=(memory,) * len(contexts), adapter_bytes=low)


def _layouts(
    tensors: ModelTensors, ctx: RankContext, spec: RolloutSpec, *, own_server: bool
) -> tuple[WeightLayout, ...]:
    """Layouts of the schedulers, if each receives its own part and the split is known; otherwise of the replica."""
    if own_server and spec.ep_size in (1, spec.num_devices):
        parts = worker_layouts(tensors, load_model_config(spec.model), ctx, spec, on_their_nodes=True)
        if parts is not None:
            return parts
    return (tensors.layout_of_replica(ctx, spec, on_host=True),)
