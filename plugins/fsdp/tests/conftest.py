"""Models, and the results of all worlds: each world starts once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from worlds import WORLD_S, Case, run_world

from rlsdk.testing.process.models import write_tiny_model

Results = Mapping[tuple[int, str], list[Any]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, str]:
    small = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    found = {
        "plain": write_tiny_model(folder / "plain", seed=1),
        "tied": write_tiny_model(folder / "tied", tied=True, seed=2, architecture="llama"),
        "six heads": write_tiny_model(
            folder / "six_heads", seed=6, vocab_size=131, hidden_size=96, num_attention_heads=6, head_dim=16
        ),
        "qwen3": write_tiny_model(folder / "qwen3", seed=3, architecture="qwen3", vocab_size=131),
        # Layer norms with biases, learned positions, matrices stored the other way round.
        "gpt2": write_model(
            folder / "gpt2", transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        ),
        # Sliding windows, two rotary tables, and a buffer beside a parameter that no checkpoint holds.
        "gemma3": write_model(folder / "gemma3", transformers.Gemma3TextConfig(**small, sliding_window=5)),
        # Experts that transformers joins into one tensor while it loads them.
        "mixture": write_model(
            folder / "mixture",
            transformers.Qwen3MoeConfig(**small, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        ),
    }
    damage(folder)
    return {name: str(path) for name, path in found.items()}


def write_model(folder: Path, config: Any) -> Path:
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return folder


def damage(folder: Path) -> None:
    """Model folders that cannot be loaded."""
    (folder / "no_weights").mkdir()
    shutil.copy(folder / "plain" / "config.json", folder / "no_weights")
    shutil.copytree(folder / "plain", folder / "mixed_up")
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "mixed_up" / "config.json").write_text(json.dumps({**config, "intermediate_size": 320}))


def damage_checkpoints(folder: Path) -> None:
    """Copies of the checkpoint of two ranks, each with a fault."""
    saved, damaged = folder / "saved", folder / "damaged"
    second = next(path.name for path in sorted(saved.glob("*.safetensors")) if "00002" in path.name)
    for name in ("no state", "half", "cut", "other model", "empty", "name of a moment", "name of a count"):
        shutil.copytree(saved, damaged / name)
    (damaged / "no state" / "engine.json").unlink()
    (damaged / "half" / second).unlink()
    cut = damaged / "cut" / second
    cut.write_bytes(cut.read_bytes()[:-1000])
    for path in (damaged / "empty").iterdir():
        path.unlink()
    for path in (damaged / "name of a moment").glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(b'"exp_avg/model.norm.weight"', b'"exp_avg/model.norm.weighT"'))
    counts = damaged / "name of a count" / "engine.json"
    counts.write_text(counts.read_text().replace('"model.norm.weight"', '"model.norm.weighT"'))
    for path in (damaged / "other model").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: t for name, t in tensors.items() if "layers.1" not in name}, path)


@pytest.fixture(scope="session")
def worlds(models: dict[str, str], folder: Path) -> Mapping[int, list[Case]]:
    for name in ("saved", "saved_hybrid", "saved_adapter", "saved_split"):
        (folder / name).mkdir()
    for name in ("export", "export_tied", "parts", "parts_hybrid"):
        (folder / name).mkdir()
    return {
        2: cases.pair(models, folder),
        3: cases.three(models, folder),
        4: cases.four(models, folder),
        1: cases.alone(models, folder),
    }


@pytest.fixture(scope="session")
def results(worlds: Mapping[int, list[Case]], folder: Path) -> Results:
    found: dict[tuple[int, str], list[Any]] = {}
    for world, chosen in worlds.items():
        if world == 4:
            damage_checkpoints(folder)
        found |= {(world, name): ranks for name, ranks in run_world(world, chosen, folder).items()}
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for a world waits for all of its cases."""
    for item in items:
        if "results" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(2 * WORLD_S))
