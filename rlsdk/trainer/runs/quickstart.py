"""Creates the quickstart's model and tokenizer locally, without a download."""

from __future__ import annotations

from pathlib import Path

from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.model.tokenizers import write_char_tokenizer
from rlsdk.system.atomic import atomic_write_json

CHARACTERS = "abcdefghijklmnopqrstuvwxyz>"
MODEL_FOLDER = "model"
TASK = "quickstart:spell_backward"
"""The data whose words the tokenizer reads."""


def make_model(config: RunConfig, run_dir: Path) -> RunConfig:
    """Writes a two-layer Llama of 1.1 million parameters (its `config.json`) and a character tokenizer.

    The engine initializes the weights at random, with `trainer.seed`. Returns the configuration that uses the model.

    Raises:
        ConfigError: the task contains characters that the tokenizer does not have.
    """
    task = config.data.train or ""
    if task != TASK:
        raise ConfigError(
            f"data.train {task!r}: the quickstart's model reads words only; give {Setting('model.path')} as well"
        )
    folder = run_dir / MODEL_FOLDER
    tokenizer = write_char_tokenizer(folder, CHARACTERS, lowercase=True)
    # Written by hand: importing the class from transformers would take this process two seconds.
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": max(64, (config.data.max_prompt_tokens or 0) + config.rollout.max_response_tokens),
        "attention_bias": True,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    atomic_write_json(folder / "config.json", shape)
    model = config.model.model_copy(update={"path": str(folder), "init_from_config": True})
    return config.model_copy(update={"model": model})
