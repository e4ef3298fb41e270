"""Shapes of well-known models, for plans without a network: `--model shape:qwen2.5-7b`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.interfaces import ConfigError, nearest

PREFIX = "shape:"
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "max_position_embeddings": 32768},
    "qwen3": {"model_type": "qwen3", "max_position_embeddings": 40960},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
    },
    "llama": {"model_type": "llama", "max_position_embeddings": 131072},
    "mistral": {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None},
    "mixtral": {
        "model_type": "mixtral", "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gemma2": {"model_type": "gemma2", "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "deepseek_v3": {
        "model_type": "deepseek_v3", "max_position_embeddings": 163840, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    },
    "phi3": {"model_type": "phi3", "max_position_embeddings": 16384, "pad_token_id": 0},
    "smollm2": {"model_type": "llama", "max_position_embeddings": 8192, "tie_word_embeddings": True},
}  # fmt: skip
_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}
_UNTIED: Mapping[str, Any] = {"tie_word_embeddings": False}
_SHAPES: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, Any]]] = {
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2, 64, 151936), _TIED),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 128, 151936), _TIED),
    "qwen2.5-3b": ("qwen2", (2048, 11008, 36, 16, 2, 128, 151936), _TIED),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 128, 152064), _UNTIED),
    "qwen2.5-14b": ("qwen2", (5120, 13824, 48, 40, 8, 128, 152064), _UNTIED),
    "qwen2.5-32b": ("qwen2", (5120, 27648, 64, 40, 8, 128, 152064), _UNTIED),
    "qwen2.5-72b": ("qwen2", (8192, 29568, 80, 64, 8, 128, 152064), _UNTIED),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936), _TIED),
    "qwen3-1.7b": ("qwen3", (2048, 6144, 28, 16, 8, 128, 151936), _TIED),
    "qwen3-4b": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151936), _TIED),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936), _UNTIED),
    "qwen3-14b": ("qwen3", (5120, 17408, 40, 40, 8, 128, 151936), _UNTIED),
    "qwen3-32b": ("qwen3", (5120, 25600, 64, 64, 8, 128, 151936), _UNTIED),
    "qwen3-30b-a3b": (
        "qwen3_moe", (2048, 6144, 48, 32, 4, 128, 151936), {**_UNTIED, "moe_intermediate_size": 768}),
    "qwen3-235b-a22b": (
        "qwen3_moe", (4096, 12288, 94, 64, 4, 128, 151936), {**_UNTIED, "moe_intermediate_size": 1536}),
    "llama-3.2-1b": ("llama", (2048, 8192, 16, 32, 8, 64, 128256), _TIED),
    "llama-3.2-3b": ("llama", (3072, 8192, 28, 24, 8, 128, 128256), _TIED),
    "llama-3.1-8b": ("llama", (4096, 14336, 32, 32, 8, 128, 128256), _UNTIED),
    "llama-3.1-70b": ("llama", (8192, 28672, 80, 64, 8, 128, 128256), _UNTIED),
    "llama-3.1-405b": ("llama", (16384, 53248, 126, 128, 8, 128, 128256), _UNTIED),
    "mistral-7b": ("mistral", (4096, 14336, 32, 32, 8, 128, 32768), _UNTIED),
    "mistral-nemo-12b": ("mistral", (5120, 14336, 40, 32, 8, 128, 131072), _UNTIED),
    "mistral-small-24b": ("mistral", (5120, 32768, 40, 32, 8, 128, 131072), _UNTIED),
    "mixtral-8x7b": ("mixtral", (4096, 14336, 32, 32, 8, 128, 32000), _UNTIED),
    "gemma-2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256, 256000), {}),
    "gemma-2-9b": ("gemma2", (3584, 14336, 42, 16, 8, 256, 256000), {}),
    "gemma-2-27b": ("gemma2", (4608, 36864, 46, 32, 16, 128, 256000), {}),
    "gemma-3-1b": ("gemma3", (1152, 6912, 26, 4, 1, 256, 262144), {}),
    "phi-3.5-mini": ("phi3", (3072, 8192, 32, 32, 32, 96, 32064), _UNTIED),
    "phi-4": ("phi3", (5120, 17920, 40, 40, 10, 128, 100352), _UNTIED),
    "deepseek-v3-671b": (
        "deepseek_v3", (7168, 18432, 61, 128, 128, 64, 129280), {**_UNTIED, "moe_intermediate_size": 2048}),
    "smollm2-135m": ("smollm2", (576, 1536, 30, 9, 3, 64, 49152), {}),
    "smollm2-360m": ("smollm2", (960, 2560, 32, 15, 5, 64, 49152), {}),
    "smollm2-1.7b": ("smollm2", (2048, 8192, 24, 32, 32, 64, 49152), {}),
}  # fmt: skip
NAMES = tuple(_SHAPES)


def is_shape(path: str) -> bool:
    """Whether a model's path names a shape rather than a folder or a model on the hub."""
    return path.startswith(PREFIX)


def shape_fields(path: str) -> dict[str, Any]:
    """The fields of a known model's `config.json` that shapes and memory depend on.

    Args:
        path: `shape:NAME`, in any case.

    Raises:
        ConfigError: no such shape, with the nearest name.
    """
    name = path.removeprefix(PREFIX).lower()
    if name not in _SHAPES:
        raise ConfigError(
            f"model.path {path!r}: no known shape{nearest(name, NAMES)}; known are {', '.join(NAMES)}. For another "
            "model give a folder that holds its config.json: rlsdk plan --model FOLDER"
        )
    family, sizes, own = _SHAPES[name]
    return {**_FAMILIES[family], **dict(zip(_FIELDS, sizes, strict=True)), **own}


def count_parameters(fields: Mapping[str, Any]) -> int | None:
    """Number of parameters in the matrices of a decoder, from its `config.json`: attention, gated MLP or experts, and
    vocabulary. Within a few percent for families with such layers.

    Returns:
        None: fields are missing, as in families that name them otherwise.
    """
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not all(isinstance(fields.get(name), int) for name in names):
        return None
    hidden, inner, layers, heads, vocabulary = (int(fields[name]) for name in names)
    groups, head = fields.get("num_key_value_heads") or heads, fields.get("head_dim") or hidden // heads
    experts = fields.get("num_experts") or fields.get("num_local_experts") or fields.get("n_routed_experts") or 1
    mlp = 3 * hidden * experts * ((fields.get("moe_intermediate_size") or inner) if experts > 1 else inner)
    embeddings = 1 if fields.get("tie_word_embeddings") else 2
    return int(layers * (2 * hidden * head * (heads + groups) + mlp) + embeddings * vocabulary * hidden)
