"""How much memory keys and values take."""

from __future__ import annotations

from typing import Any

from rlsdk.interfaces import DTYPE_BYTES


def bytes_per_token(config: Any, dtype: str) -> int:
    """Of keys and values of one token over all layers."""
    text = config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * kv_heads * head_size(config) * DTYPE_BYTES[dtype])


def head_size(config: Any) -> int:
    """Dimensions of an attention head."""
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
