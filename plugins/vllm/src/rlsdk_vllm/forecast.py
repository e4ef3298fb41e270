"""Forecasts the backend's memory without vLLM, for `rlsdk plan`."""

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
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.environment import has_own_process
from rlsdk_vllm.low_rank import adapter_slots
from rlsdk_vllm.memory import BLOCK_TOKENS, MAX_SHARE

OWN_BYTES, CORE_BYTES, WORKER_BYTES = 250 << 20, 450 << 20, 500 << 20
"""Host memory in bytes of vLLM's modules: in the worker's own process; in a separate engine process; in each of the
engine's own workers. Proportional set sizes of vLLM 0.32 on a CPU; see docs/benchmarks.md."""
CONTEXT_BYTES, GRAPH_BYTES = 512 << 20, 1 << 30
"""Device memory that stays while the engine sleeps: the context of a process of its own; captured graphs, unless
`rollout.engine_kwargs.sleep_mode_offload_cudagraph` frees them. Common figures, not measured."""


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`. On a GPU vLLM takes its whole share of the device: weights first, the rest for the KV cache. On
    a CPU the KV cache has room for all running samples, up to a share of host memory (the forecast takes this share of
    all memory, the engine of free memory).
    """
    spec = rollout(spec, "vllm")
    options = spec.options if isinstance(spec.options, VllmOptions) else VllmOptions()
    adapter_slots(spec, options)
    tensors = ModelTensors.read(spec)
    weights = tensors.replica_numel(spec) * DTYPE_BYTES[spec.model.dtype]
    blocks = -(-spec.max_model_tokens // BLOCK_TOKENS) + 1
    cache = options.kv_cache_mb << 20 if options.kv_cache_mb is not None else cache_bytes(
        contexts[0],
        spec,
        workload,
        weights_bytes=weights,
        sample_tokens=blocks * BLOCK_TOKENS,
        gpu_share=options.gpu_memory_utilization,
        host_share=MAX_SHARE,
    )  # fmt: skip
    # Activations are part of vLLM's share of a GPU; on a CPU they are small and not counted.
    apart = has_own_process(contexts[0], spec, options) or spec.num_devices > 1
    processes = WORKER_BYTES + CORE_BYTES // spec.num_devices if apart else OWN_BYTES
    memory = RankMemory(weights_bytes=weights, cache_bytes=cache, cache_stays=True, process_bytes=processes)
    if contexts[0].device != "cpu":
        memory = replace(memory, asleep_bytes=_asleep_bytes(spec, options, apart=apart))
    layouts = tuple(_layouts(tensors, ctx, spec, apart) for ctx in contexts)
    low = adapter_numel(spec.model) * DTYPE_BYTES[spec.model.dtype]
    return Forecast(layouts=layouts, memory=(memory,) * len(contexts), adapter_bytes=low)


def _asleep_bytes(spec: RolloutSpec, options: VllmOptions, *, apart: bool) -> int:
    """Device memory of an engine that sleeps. While it is awake this is part of its share of the device."""
    has_graphs = not options.enforce_eager and not spec.engine_kwargs.get("sleep_mode_offload_cudagraph")
    return CONTEXT_BYTES * apart + GRAPH_BYTES * has_graphs


def _layouts(tensors: ModelTensors, ctx: RankContext, spec: RolloutSpec, apart: bool) -> tuple[WeightLayout, ...]:
    """Layouts of the workers, if each receives its own part and the split is known; otherwise of the replica."""
    if apart:
        parts = worker_layouts(tensors, load_model_config(spec.model), ctx, spec, on_their_nodes=spec.dp_size > 1)
        if parts is not None:
            return parts
    return (tensors.layout_of_replica(ctx, spec, on_host=apart),)
