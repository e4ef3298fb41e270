"""Filling a sharded model: each rank reads its own rows of the checkpoint, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsdk.interfaces import Box, ConfigError, ModelSpec
from rlsdk.kit.hf import build_model, canonical_parameters
from rlsdk_fsdp.shards import box_of, fill

INDEX = "model.safetensors.index.json"
HEADS = ("score.", "classifier.")
"""Names of value and score heads, which a language model's checkpoint does not have."""
HEAD_STD = 0.02


def load_weights(
    model: Any, parameters: Mapping[str, nn.Parameter], spec: ModelSpec, *, seed: int, random: bool
) -> None:
    """Fills parameters and buffers of a model that was built empty.

    A checkpoint whose names are the model's is read by rows. Random weights, and checkpoints that transformers converts
    while it loads them, are built whole on the host first, the same on every rank.
    """
    restore_buffers(model)
    files = {} if random else checkpoint_files(spec)
    missing = sorted(parameters.keys() - files.keys())
    if random or not all(name.startswith(HEADS) for name in missing):
        whole, _ = canonical_parameters(build_model(spec, dtype=torch.float32, seed=seed, init_from_config=random))
        for name, parameter in parameters.items():
            fill(parameter, whole[name].detach()[box_of(parameter).slices(_whole(parameter))])
        return
    _read_rows({name: p for name, p in parameters.items() if name in files}, files)
    for name in missing:
        # A head that the checkpoint does not have: drawn whole on every rank with one seed, then cut.
        drawn = torch.zeros(parameters[name].shape)
        if drawn.dim() > 1:
            nn.init.normal_(drawn, std=HEAD_STD, generator=torch.Generator().manual_seed(seed))
        fill(parameters[name], drawn[box_of(parameters[name]).slices(_whole(parameters[name]))])


def checkpoint_files(spec: ModelSpec) -> dict[str, Path]:
    """Tensor name -> safetensors file that holds it.

    Raises:
        ConfigError: the model has no safetensors.
    """
    from safetensors import safe_open

    folder = _folder(spec)
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"model.path {spec.path!r}: found neither model.safetensors nor {INDEX}; save it with save_pretrained, or "
            "set model.init_from_config to start from random weights"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def restore_buffers(model: Any) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies), lost when the model was built empty."""
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)) and not any(True for _ in module.parameters(recurse=False)):
            model._init_weights(module)


def _read_rows(parameters: Mapping[str, nn.Parameter], files: Mapping[str, Path]) -> None:
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name in parameters:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                box = box_of(parameters[name])
                if not box.numel:
                    continue
                stored = file.get_slice(name)
                shape = tuple(stored.get_shape())
                if shape != tuple(parameters[name].shape):
                    raise ConfigError(
                        f"{path}: {name!r} has shape {shape}, the model wants {tuple(parameters[name].shape)}"
                    )
                fill(parameters[name], stored[box.slices(_whole(parameters[name]))] if shape else file.get_tensor(name))


def _folder(spec: ModelSpec) -> Path:
    if Path(spec.path).is_dir():
        return Path(spec.path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(spec.path, revision=spec.revision, allow_patterns=["*.safetensors", "*.json"]))


def _whole(parameter: torch.Tensor) -> Box:
    return Box.whole(tuple(parameter.shape))
