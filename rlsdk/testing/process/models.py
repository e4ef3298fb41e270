"""Tiny randomly initialised models with real architectures."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlsdk.interfaces import Batch, nearest
from rlsdk.kit.files.model_files import WEIGHTS
from rlsdk.kit.model.hf import persistent_buffers
from rlsdk.kit.model.tokenizers import SPECIAL, write_char_tokenizer

CHARACTERS = "".join(chr(code) for code in range(33, 127))
CONFIGS = {
    "qwen2": "Qwen2Config",
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "glm4_moe": "Glm4MoeConfig",
    "granite": "GraniteConfig",
    "gemma2": "Gemma2Config",
}
ROUTED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
    **{"kv_lora_rank": 48, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    # As in the files of DeepSeek-V3: transformers supports no other value, but engines read it.
    **{"num_key_value_heads": 4, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Configuration of a small `deepseek_v3`: latent attention, and a layer whose router has a bias."""

ROUTED_GLM = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
}
"""Configuration of a small `glm4_moe`: plain attention, and a layer whose router has a bias."""

OWN_CODE = """from pathlib import Path

from transformers import {config}, {model}, PreTrainedTokenizerFast

Path({ran!r}).touch()


class OwnConfig({config}):
    pass


class OwnModel({model}):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


CUT = "a é√"
"""Characters of one to three bytes, of which the tokens of `write_cut_tokenizer` are made."""


def write_tiny_model(
    folder: Path,
    *,
    architecture: str = "qwen2",
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    sharpness: float = 1.0,
    stored: str = "float32",
    file_bytes: int | None = None,
    **shape: Any,
) -> Path:
    """Writes a causal LM of about 0.3 million random parameters and a character tokenizer.

    All supported inference engines can run its shape (heads of 32, 2 key-value heads) on a CPU.

    Args:
        folder: folder to write to.
        architecture: `qwen2`, `llama`, `qwen3`, `qwen3_moe`, `deepseek_v2`, `deepseek_v3`, `glm4_moe`, `granite`
            or `gemma2`.
        tied: input and output embeddings are one tensor.
        seed: seed of the weights.
        layers: number of decoder layers.
        sharpness: factor of all logits. A wrong temperature is easier to see in a more confident model.
        stored: dtype of the files and in the configuration.
        file_bytes: maximum size of a weight file; the weights are then split over several files with an index. None:
            one file.
        shape: fields of the configuration instead of the defaults (vocab_size 128, hidden_size 128, ...).

    Raises:
        ValueError: no such architecture.
    """
    import transformers

    if architecture not in CONFIGS:
        raise ValueError(f"architecture {architecture!r}{nearest(architecture, CONFIGS)}: expected {sorted(CONFIGS)}")
    tokenizer = write_char_tokenizer(folder, CHARACTERS)
    fields = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **shape,
    }
    config = getattr(transformers, CONFIGS[architecture])(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # A new model is nearly uniform; larger weights make log-probs, and errors in them, visible.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
        for buffer in persistent_buffers(model).values():  # such as biases of routers, which are initialised to 0
            torch.nn.init.normal_(buffer, std=0.3)
        torch.nn.init.constant_(model.get_decoder().norm.weight, sharpness)
    model.to(getattr(torch, stored)).save_pretrained(folder, **({"max_shard_size": file_bytes} if file_bytes else {}))
    return folder


def write_cut_tokenizer(folder: Path, size: int) -> None:
    """Replaces a model's tokenizer by one of this many byte-level tokens that begin and end within characters, as in
    large vocabularies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found, pieces = list(SPECIAL), sorted({byte for text, _ in whole.pre_tokenize_str(CUT) for byte in text})
    longer = pieces
    while len(found) < size:
        found += longer[: size - len(found)]
        longer = [begin + piece for begin in longer for piece in pieces]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(found)}, merges=[]))
    tokenizer.pre_tokenizer = whole
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    fast.save_pretrained(folder)


def without_tensor(folder: Path, to: Path) -> Path:
    """A copy of a model whose file lacks the last norm."""
    if not to.exists():
        shutil.copytree(folder, to)
        tensors = load_file(to / WEIGHTS)
        del tensors["model.norm.weight"]
        save_file(tensors, to / WEIGHTS, metadata={"format": "pt"})
    return to


def code_ran(folder: Path) -> Path:
    """A file that the code from `add_code` creates when it runs."""
    return folder.with_name(f"{folder.name}-code-ran")


def add_code(folder: Path) -> None:
    """Adds code to a model's folder and names it in the configuration and the tokenizer (`auto_map`), as in models of
    families that transformers does not have."""
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    kind, made = CONFIGS[config["model_type"]], config["architectures"][0]
    code = OWN_CODE.format(ran=str(code_ran(folder)), config=kind, model=made)
    (folder / "modeling_own.py").write_text(code, encoding="utf-8")
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "modeling_own.OwnTokenizer"]}
    for name, fields in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (folder / name).write_text(json.dumps(fields, indent=2), encoding="utf-8")


def random_batch(num_rows: int, *, longest: int = 20, vocabulary: int = 128, seed: int = 0) -> Batch:
    """Rows of random length and tokens, with every field that a policy objective reads."""
    source = random.Random(seed)
    rows = [[source.randrange(vocabulary) for _ in range(source.randint(2, longest))] for _ in range(num_rows)]
    batch = Batch.from_rows(rows)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.tensor([source.randint(1, len(row) - 1) for row in rows])
    mask = batch.position_ids >= torch.repeat_interleave(prompt, batch.lengths)
    noise = torch.randn(3, batch.num_tokens, generator=generator)
    return batch.with_tokens(
        response_mask=mask,
        advantages=noise[0] * mask,
        old_log_probs=(noise[1] * 0.1 - 4.0) * mask,
        rollout_log_probs=(noise[2] * 0.1 - 4.0) * mask,
        loss_weight=mask / mask.sum(),
    )
