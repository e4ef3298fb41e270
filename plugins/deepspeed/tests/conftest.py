"""Models, and worlds of several sizes, whose processes all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import transformers

from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.worlds import Seat, World, close_process_pools


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("models")
    small = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    mixture = transformers.AutoModelForCausalLM.from_config(small)
    mixture.save_pretrained(folder / "mixture")
    found = {
        "plain": write_tiny_model(folder / "plain", seed=1),
        "tied": write_tiny_model(folder / "tied", tied=True, seed=2, architecture="llama"),
        "odd": write_tiny_model(folder / "odd", seed=3, architecture="qwen3", vocab_size=131),
        # Experts that transformers joins into one tensor of three dimensions while it loads them.
        "mixture": folder / "mixture",
    }
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    yield lambda size: World(size, Seat(backend="deepspeed"))
    close_process_pools()
