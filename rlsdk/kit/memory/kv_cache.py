"""Size of a KV cache."""

from __future__ import annotations

from typing import Any

from rlsdk.interfaces import DTYPE_BYTES


def bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes of the keys and values of one token over all layers.

    For latent attention (arXiv 2405.04434, section 2.1) engines and transformers store the latent vector and the
    rotated part of the key, which all heads share.
    """
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        one = text.kv_lora_rank + text.qk_rope_head_dim
    else:
        one = 2 * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size(config)
    return int(text.num_hidden_layers * one * DTYPE_BYTES[dtype])


def head_size(config: Any) -> int:
    """Dimensions of an attention head."""
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
