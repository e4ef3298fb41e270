"""Creates a small model with random weights and a byte-level tokenizer, to try things out offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError, nearest

CONFIGS = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "llama": "LlamaConfig", "mistral": "MistralConfig"}
HEAD_DIM = 32


def make_model(
    folder: str | os.PathLike[str],
    *,
    architecture: str = "qwen2",
    hidden: int = 128,
    layers: int = 2,
    context: int = 2048,
) -> Path:
    """Writes `config.json`, safetensors and tokenizer files into a new folder; returns it.

    Args:
        folder: a new one, or an empty one.
        architecture: qwen2, qwen3, llama or mistral.
        hidden: width; a multiple of 64.
        layers: of the decoder.
        context: most tokens of prompt and response.

    Raises:
        ConfigError: an unknown architecture, a width that is no multiple of 64, or a folder that is not empty.
    """
    folder = Path(folder)
    if architecture not in CONFIGS:
        raise ConfigError(
            f"architecture {architecture!r}{nearest(architecture, CONFIGS)}; expected one of {sorted(CONFIGS)}"
        )
    if hidden < 64 or hidden % 64:
        raise ConfigError(f"hidden {hidden}: expected a multiple of 64 (heads have {HEAD_DIM} dimensions)")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} is not empty; name a new folder")
    import transformers

    from rlsdk.kit.model.hf import no_progress_bars
    from rlsdk.kit.model.tokenizers import write_byte_tokenizer

    tokenizer = write_byte_tokenizer(folder)
    heads = hidden // HEAD_DIM
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, CONFIGS[architecture])(**fields))
    with no_progress_bars():
        model.save_pretrained(folder)
    return folder
