"""Options of the backend `sglang`. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """What only this backend knows. Anything else that `sglang.Engine` takes goes through `rollout.engine_kwargs`."""

    url: str | None = None
    """Of a server that runs on this machine, started by `python -m rlsdk_sglang.server`; it continues when the run
    ends.
    None: an engine of the worker's own. With a server, all options but this and `stream_interval` are the server's."""
    enable_prefix_caching: bool = True
    """Keeps keys and values of prompts for later requests (SGLang's radix cache); dropped with every update."""
    kv_cache_mb: int | None = None
    """MiB for keys and values. None: on a GPU what `memory_share` leaves; on a CPU enough for all running samples at
    full length, at most a quarter of the machine's free memory."""
    memory_share: float = 0.6
    """Share of a GPU's memory for weights, keys and values: SGLang's `mem_fraction_static`."""
    attention_backend: str | None = None
    """Name of SGLang's attention kernels. None: on a CPU `torch_native`, else SGLang's own choice."""
    cuda_graphs: bool = True
    """Captures graphs of decoding on a GPU."""
    stream_interval: int = 1
    """Tokens between two reports of a running sample. An abort gives what was reported, and stop strings are looked for
    in what was: with more than 1, fewer messages, and some tokens are computed in vain."""
    log_level: str = "error"
    """Of SGLang's own messages: debug, info, warning or error."""
