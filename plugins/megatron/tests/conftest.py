"""Models, and the results of all worlds: each world starts once."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cases
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from worlds import WORLD_S, Case, run_world

from rlsdk.interfaces import AdapterSpec
from rlsdk.testing.process.models import write_tiny_model

with warnings.catch_warnings():
    # Megatron warns at import of packages that are not there; pytest makes errors of warnings.
    warnings.simplefilter("ignore")
    import rlsdk_megatron.engine  # noqa: F401


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, str]:
    found = {
        "plain": write_tiny_model(folder / "plain", seed=1, layers=4),
        # Biases of attention, the projection's too.
        "tied": write_tiny_model(folder / "tied", tied=True, seed=2, architecture="llama", attention_bias=True),
        # Norms of queries and keys; a vocabulary that no number of ranks divides.
        "qwen3": write_tiny_model(folder / "qwen3", seed=3, architecture="qwen3", vocab_size=131),
        # Scaled rotary frequencies, and no bias anywhere.
        "llama3": write_tiny_model(
            folder / "llama3",
            seed=4,
            architecture="llama",
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "mixture": write_mixture(folder / "mixture"),
    }
    return {name: str(path) for name, path in found.items()}


def write_mixture(folder: Path) -> Path:
    """Experts, which transformers joins into one tensor while it loads them."""
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    return folder


def write_start(folder: Path, model: str, spec: AdapterSpec) -> None:
    """An adapter in PEFT's format, both of whose matrices are random."""
    import torch
    from peft import LoraConfig, get_peft_model

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    chosen = [
        name
        for name in targets
        if name != "lm_head"
        and (spec.targets == ("all-linear",) or name in spec.targets or name.rpartition(".")[2] in spec.targets)
    ]
    found = get_peft_model(plain, LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=chosen))
    generator = torch.Generator().manual_seed(8)
    for name, parameter in found.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    found.save_pretrained(folder)


def damage_checkpoints(folder: Path) -> None:
    """Copies of a checkpoint of two ranks, each with a fault."""
    saved, damaged = folder / "saved_tp2", folder / "damaged"
    for name in ("no state", "no index", "half", "cut", "other model", "other file", "empty"):
        shutil.copytree(saved, damaged / name)
    (damaged / "no state" / "engine.json").unlink()
    (damaged / "no index" / "index.json").unlink()
    (damaged / "half" / "rank-00001.safetensors").unlink()
    cut = damaged / "cut" / "rank-00001.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    for path in (damaged / "empty").iterdir():
        path.unlink()
    for name in ("other model", "other file"):
        for path in (damaged / name).glob("*.safetensors"):
            tensors = load_file(path)
            save_file({key: t for key, t in tensors.items() if "layers.1" not in key}, path)
    index = damaged / "other model" / "index.json"
    places = json.loads(index.read_text())
    index.write_text(json.dumps({key: place for key, place in places.items() if "layers.1" not in key}))


@pytest.fixture(scope="session")
def worlds(models: dict[str, str], folder: Path) -> Mapping[int, list[Case]]:
    for name in cases.FOLDERS:
        (folder / name).mkdir()
    for model, *targets in cases.STARTED:
        spec = cases.started(folder, model, *targets)
        write_start(Path(spec.path or ""), models[model], spec)
    return {2: cases.pair(models, folder), 4: cases.four(models, folder), 1: cases.alone(models, folder)}


class Results:
    """`results[world, name]`: what each rank found. A world runs when it is first asked for, after those whose
    checkpoints it reads; that of two ranks in two halves, neither of which takes too long."""

    def __init__(self, worlds: Mapping[int, list[Case]], folder: Path) -> None:
        self.worlds, self.folder = worlds, folder
        self.found: dict[tuple[int, bool], dict[str, list[Any]]] = {}

    def __getitem__(self, key: tuple[int, str]) -> list[Any]:
        world, name = key
        return self._part(world, adapters=world == 2 and "adapter" in name)[name]

    def _part(self, world: int, *, adapters: bool) -> dict[str, list[Any]]:
        if world != 2:
            self._part(2, adapters=False)
            self._part(2, adapters=True)
        if (world, adapters) not in self.found:
            if world == 4:
                damage_checkpoints(self.folder)
            chosen = [case for case in self.worlds[world] if world != 2 or ("adapter" in case.name) is adapters]
            self.found[world, adapters] = run_world(world, chosen, self.folder)
        return self.found[world, adapters]


@pytest.fixture(scope="session")
def results(worlds: Mapping[int, list[Case]], folder: Path) -> Results:
    return Results(worlds, folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for a world waits for all of its cases."""
    for item in items:
        if "results" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(2 * WORLD_S))
