"""Whether the weight files of a model hold the model that its `config.json` describes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlsdk.interfaces import ConfigError, ModelSpec
from rlsdk.kit.files.weight_files import checkpoint_files, open_weights
from rlsdk.kit.weights.tensor_origins import Source

ROWS_AT_ONCE = 4096
"""Rows of two tensors that are compared at a time."""
_DERIVED = re.compile(r"inv_freq$|masked_bias$")
"""Tensors of older files that are computed from the configuration."""


def check_fits(
    spec: ModelSpec,
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    written: Sequence[Source] | None = None,
) -> None:
    """Checks that the files fit the model, for engines that read by name. Reads headers only, unless the files hold
    two copies of a tied tensor.

    Files in which names differ (an engine's loader may translate them) are judged by the names that both have.

    Args:
        spec: the model.
        model: the transformers model, possibly on the meta device.
        shapes: of its tensors, by name.
        tied: other name of a tensor -> its name in `shapes`.
        written: see `file_tensors`: the tensors of the files, where they are not those of the model.

    Raises:
        ConfigError: a tensor has another shape, two copies of a tied one differ, or the files hold tensors for which
            parts of the model have no place.
    """
    files = checkpoint_files(spec)
    known = {**shapes, **{other: shapes[name] for other, name in tied.items()}}
    known |= {source.name: tuple(source.shape) for source in written or ()}
    _check_shapes(spec, files, known)
    for other, name in tied.items():
        if other in files and name in files and not _are_equal(files, other, name):
            raise tie_error(spec, other, name)
    check_unused(spec, model, known, files)


def check_unused(spec: ModelSpec, model: Any, names: Collection[str], in_files: Iterable[str]) -> None:
    """Checks that no part of the model leaves tensors of the files out: a bias that `config.json` does not have, or
    further layers. Tensors of other parts (an image encoder, another head) are not judged.

    Args:
        spec: the model.
        model: the transformers model: says which tensors it leaves out on purpose, and whether it is quantized.
        names: of its tensors.
        in_files: names in the files.

    Raises:
        ConfigError: names the first such tensor.
    """
    if getattr(model.config, "quantization_config", None) is not None:  # scales belong to the weights
        return
    on_purpose = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = {name for name, _ in model.named_buffers()}
    left = [
        name
        for name in sorted(set(in_files) - set(names) - buffers)
        if not _DERIVED.search(name) and not any(re.search(pattern, name) for pattern in on_purpose)
    ]
    owners = {name.rpartition(".")[0] for name in names}
    lists = _lists(names)
    unused = [name for name in left if any(part in owners or _is_further(part, lists) for part in _parts(name))]
    if unused:
        raise ConfigError(
            f"model.path {spec.path!r}: the checkpoint holds {len(unused)} tensors for which the model of config.json "
            f"has no place, first {unused[0]!r}: weights would be left out. Give the config.json that belongs to the "
            "weights (number of layers, biases), or remove these tensors from the files"
        )


def tie_error(spec: ModelSpec, other: str, name: str) -> ConfigError:
    """The error for a tied tensor of which the files hold two different copies."""
    return ConfigError(
        f"model.path {spec.path!r}: config.json ties {other!r} to {name!r} (tie_word_embeddings), but the checkpoint "
        f"holds both, with different values. Set tie_word_embeddings to false in config.json, or remove {other!r} from "
        "the files"
    )


def _check_shapes(spec: ModelSpec, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> None:
    by_file: dict[Path, list[str]] = {}
    for name in files.keys() & shapes.keys():
        by_file.setdefault(files[name], []).append(name)
    in_file: dict[str, tuple[int, ...]] = {}
    for path, names in by_file.items():
        with open_weights(path) as file:
            in_file |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    wrong = [name for name, shape in shapes.items() if name in in_file and in_file[name] != tuple(shape)]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"model.path {spec.path!r}: {len(wrong)} tensors of the checkpoint do not fit config.json, first {name!r}: "
            f"it has shape {in_file[name]} in {files[name].name}, but config.json makes it {tuple(shapes[name])}; the "
            "folder mixes files of two models: give the config.json that belongs to the weights"
        )


def _are_equal(files: Mapping[str, Path], first: str, second: str) -> bool:
    """Whether two tensors of the same shape have the same values."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(open_weights(files[name])).get_slice(name) for name in (first, second))
        rows = one.get_shape()[0]
        return all(
            torch.equal(one[at : at + ROWS_AT_ONCE], other[at : at + ROWS_AT_ONCE])
            for at in range(0, rows, ROWS_AT_ONCE)
        )


def _parts(name: str) -> list[str]:
    """Names of the modules that a tensor is in, the outermost first."""
    pieces = name.split(".")[:-1]
    return [".".join(pieces[: at + 1]) for at in range(len(pieces))]


def _lists(names: Iterable[str]) -> Mapping[str, set[str]]:
    """Names of module lists -> their indices."""
    children: dict[str, set[str]] = {}
    for name in names:
        for part in _parts(name):
            parent, _, child = part.rpartition(".")
            children.setdefault(parent, set()).add(child)
    return {parent: keys for parent, keys in children.items() if all(child.isdecimal() for child in keys)}


def _is_further(part: str, lists: Mapping[str, set[str]]) -> bool:
    """Whether a module is an item that its list does not have."""
    parent, _, child = part.rpartition(".")
    return parent in lists and child.isdecimal() and child not in lists[parent]
