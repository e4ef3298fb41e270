"""What a token costs in the cache, held to what transformers keeps for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rlsdk.kit.memory.kv_cache import bytes_per_token
from rlsdk.testing.process.models import write_tiny_model

LATENT = {
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 2,
}


@pytest.mark.parametrize(
    ("architecture", "shape"), [("qwen2", {}), ("deepseek_v2", {**LATENT, "num_key_value_heads": 4})]
)
def test_a_token_takes_what_transformers_keeps_for_it(architecture: str, shape: dict[str, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, architecture=architecture, **shape))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(7)[None], past_key_values=cache)
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert sum(tensor.nbytes for tensor in kept) == 7 * bytes_per_token(model.config, "float32")
