"""Finds the weight files of a Hugging Face model, checks that they are whole, and initialises a head that they lack."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError, ModelSpec
from rlsdk.kit.files.model_files import INDEX, WEIGHTS
from rlsdk.system.files import read_regular

HEADS = ("score", "classifier")
"""Head modules of values and scores, which checkpoints of language models do not have."""


def checkpoint_files(spec: ModelSpec) -> dict[str, Path]:
    """Tensor name -> safetensors file that contains it.

    Raises:
        ConfigError: the model has no safetensors.
    """
    folder = _folder(spec)
    if (folder / INDEX).is_file():
        return _read_index(folder / INDEX)
    single = folder / WEIGHTS
    if not single.is_file():
        raise ConfigError(
            f"model.path {spec.path!r}: found neither {WEIGHTS} nor {INDEX}; save it with save_pretrained, or "
            "set model.init_from_config to start from random weights"
        )
    with open_weights(single) as file:
        return dict.fromkeys(file.keys(), single)


def open_weights(path: Path) -> Any:
    """A safetensors file of a model, as `safe_open` gives it.

    Raises:
        ConfigError: there is no such file, or it is cut short or of another kind.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.path: the weights could not be loaded from {str(path)!r}: {error}; copy or download that file again"
        ) from error


def _read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, as an index of several files says.

    Raises:
        ConfigError: the index is not one.
    """
    try:
        weight_map = json.loads(read_regular(path))["weight_map"]
        return {str(name): path.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.path: {str(path)!r} is not an index of weight files ({type(error).__name__}: {error}): expected "
            '{"weight_map": {TENSOR: FILE}}; copy or download it again'
        ) from error


def check_whole(spec: ModelSpec, names: Collection[str], tied: Mapping[str, str]) -> None:
    """Checks that the files have every tensor of the model, for engines that leave a missing one as it was allocated.

    Files whose names are mostly others (an engine's loader may translate them) are not judged.

    Args:
        spec: the model.
        names: of all tensors, as transformers writes them.
        tied: other name of a tensor -> its name in `names`; files may have either.

    Raises:
        ConfigError: a tensor is missing, or the model has no safetensors.
    """
    files = checkpoint_files(spec)
    have = files.keys() | {name for other, name in tied.items() if other in files}
    lacking = sorted(set(names) - have)
    if lacking and 2 * len(lacking) < len(names):
        raise ConfigError(
            f"model.path {spec.path!r}: the checkpoint lacks {len(lacking)} tensors, first {lacking[0]!r}; give a "
            "folder that holds the whole model"
        )


def new_heads(model: Any, seed: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Initial values of a head that the checkpoint lacks, drawn as transformers does, the same on every rank.

    Args:
        model: the transformers model; its parameters may be split, or have no values.
        seed: of the values.
        shapes: canonical name of a parameter -> shape of the whole tensor.
    """
    values: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in HEADS:
            if isinstance(head := getattr(model, name, None), nn.Module):
                whole = copy.copy(head)
                whole._parameters = {
                    key: nn.Parameter(torch.empty(tuple(shapes[f"{name}.{key}"])))
                    for key, _ in head.named_parameters(recurse=False)
                }
                model._init_weights(whole)
                values |= {f"{name}.{key}": p.detach() for key, p in whole._parameters.items() if p is not None}
    return values


def _folder(spec: ModelSpec) -> Path:
    if Path(spec.path).is_dir():
        return Path(spec.path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(spec.path, revision=spec.revision, allow_patterns=["*.safetensors", "*.json"]))
