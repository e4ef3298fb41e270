"""Options of the backend `vllm`. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """What only this backend knows. Anything else that `vllm.EngineArgs` takes goes through `rollout.engine_kwargs`."""

    asynchronous: bool = False
    """Runs the engine in its own process, which goes on sampling while this one does other work. False: in the
    worker's process, which is quicker to start and on small models quicker altogether."""
    enable_prefix_caching: bool = True
    """Keeps keys and values of prompts for later requests; dropped with every update of the weights."""
    kv_cache_mb: int | None = None
    """MiB for keys and values. None: on a GPU what `gpu_memory_utilization` leaves; on a CPU enough for all running
    samples at full length, at most a quarter of the machine's free memory."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU's memory that the engine may use, weights included."""
    enforce_eager: bool | None = None
    """Runs the model without compiling it or capturing graphs. None: on a CPU only, where small models gain nothing."""
    max_batched_tokens: int | None = None
    """Most tokens in one pass of the model. None: the engine's own choice."""
    engine_checksums: bool = False
    """Has vLLM take its own SHA-256 of every parameter after each update (what its `/weight_checker` says). It joins
    the receipt, and all replicas must have the same. From 0.32 on; costs a copy to the host and a second or so a GB."""
    log_level: str = "ERROR"
    """Of vLLM's own messages: DEBUG, INFO, WARNING or ERROR."""
