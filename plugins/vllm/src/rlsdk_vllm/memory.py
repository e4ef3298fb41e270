"""Memory for keys and values, and giving memory back on a CPU, where vLLM has no sleep of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil
from torch import Tensor

from rlsdk.interfaces import DTYPE_BYTES, RankContext, RolloutSpec
from rlsdk.kit.hf import load_model_config
from rlsdk_vllm.config import VllmOptions

MAX_SHARE = 0.25
"""Of a machine's free memory that keys and values take unasked, on a CPU."""
BLOCK_TOKENS = 128
"""Largest block that keys and values of a sample are rounded up to."""


def kv_cache_bytes(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> int | None:
    """What to ask vLLM for; None leaves it to `gpu_memory_utilization`."""
    if options.kv_cache_mb is not None:
        return options.kv_cache_mb << 20
    if ctx.device != "cpu":
        return None
    blocks = -(-spec.max_model_tokens // BLOCK_TOKENS) + 1
    one = blocks * BLOCK_TOKENS * bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    free = int(psutil.virtual_memory().available * MAX_SHARE)
    return max(min(one * spec.max_running, free), one)


def bytes_per_token(config: Any, dtype: str) -> int:
    """Of keys and values of one token over all layers."""
    text = config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * kv_heads * head_size(config) * DTYPE_BYTES[dtype])


def head_size(config: Any) -> int:
    """Dimensions of an attention head."""
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


class Parked:
    """Storages whose memory was given back; the tensors that look into them stay valid objects."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Any, int]] = {}

    def empty(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._sizes[storage._cdata] = (storage, storage.nbytes())
                storage.resize_(0)

    def restore(self) -> None:
        """Takes the memory again, filled with zeros."""
        for storage, size in self._sizes.values():
            storage.resize_(size)
            storage.fill_(0)
        self._sizes.clear()
