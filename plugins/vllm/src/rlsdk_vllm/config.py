"""Options of the backend `vllm`. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Options of this backend. Other arguments of `vllm.EngineArgs` go through `rollout.engine_kwargs`."""

    asynchronous: bool | None = None
    """Runs the engine in its own process, which keeps sampling while this one does other work. False: in the worker's
    process, which starts faster and is faster overall for small models on a CPU. None: in its own on a GPU, unless Ray
    starts its workers on other nodes, and wherever `rollout.dp_size` is above 1."""
    enable_prefix_caching: bool = True
    """Keeps the KV cache of prompts for later requests; dropped with every weight update."""
    kv_cache_mb: int | None = None
    """Size of the KV cache in MiB. None: on a GPU what `gpu_memory_utilization` leaves; on a CPU enough for all running
    samples at full length, at most a quarter of the machine's free memory."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU's memory that the engine may use, including weights."""
    enforce_eager: bool | None = None
    """Runs the model without compilation and graph capture. None: only on a CPU, where small models gain nothing from
    them."""
    max_batched_tokens: int | None = None
    """Most tokens in one pass of the model. None: 8,192 on a GPU, where vLLM would take 2,048 for an engine that
    serves no users; vLLM's default on a CPU."""
    engine_checksums: bool = False
    """Lets vLLM compute its own SHA-256 of every parameter after each update (as its `/weight_checker` does). It is
    part of the receipt, and must be equal on all replicas. From 0.32 on; costs a copy to the host and about a second
    per GB."""
    max_adapters: int | None = None
    """With `model.lora`, if syncs send the adapter alone: number of adapters that have memory. One that arrives while
    as many are in use is refused. None: one more than the versions that are served side by side, which are
    `schedule.max_staleness` + 1, because samples of the version that goes may still run."""
    log_level: str = "ERROR"
    """Level of vLLM's own messages: DEBUG, INFO, WARNING or ERROR."""
