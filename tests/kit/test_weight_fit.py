"""Files that hold another model than config.json describes are refused when they are loaded, by name and number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlsdk.interfaces import ConfigError, Head, ModelSpec
from rlsdk.kit.files.weight_files import WEIGHTS
from rlsdk.kit.model.hf import build_model, canonical_tensors
from rlsdk.kit.weights.file_tensors import file_tensors
from rlsdk.kit.weights.weight_fit import check_fits
from rlsdk.testing.process.models import write_tiny_model

Tensors = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"


def by_transformers(spec: ModelSpec) -> None:
    """As the built-in engines load."""
    build_model(spec)


def by_name(spec: ModelSpec) -> None:
    """As engines that read files themselves check them."""
    empty = build_model(spec, empty=True)
    tensors, tied = canonical_tensors(empty)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_fits(spec, empty, shapes, tied, file_tensors(empty, shapes))


LOADS = pytest.mark.parametrize("load", [by_transformers, by_name])


def changed(folder: Path, change: Callable[[Tensors], Tensors], *, tied: bool = False, **fields: Any) -> ModelSpec:
    """A tiny model whose tensors are extended and whose config.json is edited."""
    write_tiny_model(folder, layers=2, tied=tied)
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, **change(tensors)}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return ModelSpec(path=str(folder))


def nothing(tensors: Tensors) -> Tensors:
    return {}


@LOADS
def test_a_tied_model_whose_file_has_another_head_is_refused(tmp_path: Path, load: Callable[[ModelSpec], None]) -> None:
    said = f"config.json ties 'lm_head.weight' to '{EMBEDDING}' .*, but the checkpoint holds both"
    with pytest.raises(ConfigError, match=said):
        load(changed(tmp_path / "other", lambda tensors: {"lm_head.weight": tensors[EMBEDDING] + 1}, tied=True))
    with pytest.raises(ConfigError, match="Set tie_word_embeddings to false"):
        load(changed(tmp_path / "untied", nothing, tie_word_embeddings=True))


@LOADS
def test_a_tied_model_whose_file_has_the_same_head_is_accepted(
    tmp_path: Path, load: Callable[[ModelSpec], None]
) -> None:
    load(changed(tmp_path / "same", lambda tensors: {"lm_head.weight": tensors[EMBEDDING].clone()}, tied=True))


@LOADS
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"vocab_size": 60},
            r"2 tensors .* 'model.embed_tokens.weight': it has shape \(128, 128\) .* makes it \(60, 128\)",
        ),
        (
            {"vocab_size": 300},
            r"'model.embed_tokens.weight': .* in model.safetensors, but config.json makes it \(300, 128\)",
        ),
        ({"intermediate_size": 64}, r"6 tensors .* 'model.layers.0.mlp.gate_proj.weight': it has shape \(256, 128\)"),
    ],
)
def test_another_shape_than_that_of_the_configuration_is_named_with_both(
    tmp_path: Path, load: Callable[[ModelSpec], None], fields: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(changed(tmp_path / "m", nothing, **fields))


@LOADS
@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("model.layers.1.input_layernorm.weight", {"num_hidden_layers": 1, "layer_types": None}, 12),
        ("lm_head.bias", {}, 1),
        ("model.layers.0.self_attn.o_proj.bias", {}, 1),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", {}, 1),
    ],
)
def test_tensors_that_a_part_of_the_model_would_leave_out_are_refused(
    tmp_path: Path, load: Callable[[ModelSpec], None], name: str, fields: dict[str, Any], count: int
) -> None:
    spec = changed(tmp_path / "m", lambda tensors: {name: torch.zeros(128)}, **fields)
    with pytest.raises(ConfigError, match=rf"holds {count} tensors for which .* has no place, first '{name}'"):
        load(spec)


@LOADS
@pytest.mark.parametrize(
    "name", ["visual.patch.weight", "score.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.norm.weight"]
)
def test_tensors_of_other_parts_are_left_alone(tmp_path: Path, load: Callable[[ModelSpec], None], name: str) -> None:
    load(changed(tmp_path / "m", lambda tensors: {name: torch.zeros(1, 128)}))


def test_a_score_model_needs_no_head_of_words(tmp_path: Path) -> None:
    spec = changed(tmp_path / "m", nothing)
    build_model(ModelSpec(path=spec.path, head=Head.SCORE))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gemma2", "llama"])
def test_files_of_every_family_fit(tmp_path: Path, architecture: str) -> None:
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "m", architecture=architecture)))
    by_transformers(spec)
    by_name(spec)
