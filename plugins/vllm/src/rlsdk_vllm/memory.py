"""Memory of the KV cache."""

from __future__ import annotations

import psutil

from rlsdk.interfaces import RankContext, RolloutSpec
from rlsdk.kit.memory.kv_cache import bytes_per_token
from rlsdk.kit.model.hf import load_model_config
from rlsdk_vllm.config import VllmOptions

MAX_SHARE = 0.25
"""Largest share of the machine's free memory that the KV cache takes by default, on a CPU."""
BLOCK_TOKENS = 128
"""Largest block size of the KV cache in tokens; a sample's memory is rounded up to whole blocks."""


def kv_cache_bytes(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> int | None:
    """Size of the KV cache in bytes; None: `gpu_memory_utilization` determines it."""
    if options.kv_cache_mb is not None:
        return options.kv_cache_mb << 20
    if ctx.device != "cpu":
        return None
    blocks = -(-spec.max_model_tokens // BLOCK_TOKENS) + 1
    one = blocks * BLOCK_TOKENS * bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    free = int(psutil.virtual_memory().available * MAX_SHARE)
    return max(min(one * spec.max_running, free), one)
