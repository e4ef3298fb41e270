"""Options of the backend `sglang`. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """Options of this backend. Other arguments of `sglang.Engine` go through `rollout.engine_kwargs`."""

    url: str | None = None
    """URL of a server on this machine, started by `python -m rlsdk_sglang.server`; it continues when the run ends.
    None: the worker starts its own engine. With a server, all options except this and `stream_interval` are the
    server's."""
    enable_prefix_caching: bool = True
    """Keeps the KV cache of prompts for later requests (SGLang's radix cache); dropped with every weight update."""
    kv_cache_mb: int | None = None
    """Size of the KV cache in MiB. None: on a GPU what `memory_share` leaves; on a CPU enough for all running samples
    at full length, at most a quarter of the machine's free memory."""
    memory_share: float = 0.6
    """Share of a GPU's memory for weights and KV cache: SGLang's `mem_fraction_static`."""
    attention_backend: str | None = None
    """Name of SGLang's attention kernels. None: on a CPU `torch_native`, otherwise SGLang's own choice."""
    cuda_graphs: bool = True
    """Captures CUDA graphs of decoding on a GPU."""
    stream_interval: int = 1
    """Tokens between two reports of a running sample. Aborts return, and stop strings are searched in, the reported
    tokens: a value above 1 means fewer messages, and some tokens that are computed and discarded."""
    max_adapters: int | None = None
    """With `model.lora`, if syncs send the adapter alone: number of adapters that have memory. One that arrives while
    as many are in use is refused. None: one more than the versions that are served side by side, which are
    `schedule.max_staleness` + 1, because samples of the version that goes may still run."""
    log_level: str = "error"
    """Level of SGLang's own messages: debug, info, warning or error."""
