"""Adapters on disk in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`. Only writing needs PEFT."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlsdk.interfaces import AdapterSpec, ConfigError, ModelSpec
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.files.adapter_config import CONFIG, WEIGHTS, spec_of
from rlsdk.kit.files.atomic_files import atomic_write_json, atomic_write_tensors
from rlsdk.kit.files.export import ExportedTensor, copy_unchanged, in_dtype, write_model
from rlsdk.kit.model.adapters import ModelAdapter, merged, peft_config, short_targets
from rlsdk.kit.model.hf import build_model, canonical_parameters, persistent_buffers

_PREFIX = "base_model.model."
"""What PEFT's names have before the module's."""


def write_adapter(
    path: Path, model: Any, adapter: ModelAdapter, tensors: Mapping[str, Tensor], spec: ModelSpec
) -> None:
    """Writes an adapter, and the tokenizer files of its model's folder.

    Args:
        path: folder to write; created if missing.
        model: that has the adapter.
        adapter: of it.
        tensors: A and B by name, whole.
        spec: the model.
    """
    path.mkdir(parents=True, exist_ok=True)
    copy_unchanged(spec.path, path)
    modules = short_targets(model, list(adapter.layers))
    config = peft_config(
        adapter.spec, modules, base_model_name_or_path=spec.path, revision=spec.revision, task_type="CAUSAL_LM",
        inference_mode=True,
    ).to_dict()  # fmt: skip
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    atomic_write_tensors(path / WEIGHTS, {_PREFIX + name: tensor.detach().cpu() for name, tensor in tensors.items()})
    atomic_write_json(path / CONFIG, {**plain, "peft_type": "LORA", "task_type": "CAUSAL_LM"})


def read_adapter(spec: AdapterSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of the folder `spec.path`, float32, by our names.

    Args:
        spec: what was asked for; the folder must have the same rank and scale.
        shapes: of the adapter's tensors in this model.

    Raises:
        ConfigError: the folder has another rank or scale, or other tensors.
    """
    path = spec.path or ""
    there = spec_of(path)
    if (there.rank, there.scale) != (spec.rank, spec.scale):
        fields = (Setting(f"model.lora.{name}", getattr(there, name)) for name in ("rank", "alpha", "scaling"))
        raise ConfigError(
            f"model.lora.path {path!r} has rank {there.rank} and scale {there.scale:g}; the configuration says rank "
            f"{spec.rank} and scale {spec.scale:g}: give {' '.join(map(str, fields))}"
        )
    try:
        with safe_open(Path(path) / WEIGHTS, framework="pt") as file:
            found = {name.removeprefix(_PREFIX): file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.lora.path {path!r}: {WEIGHTS} could not be read: {error}") from error
    have = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if wrong := sorted(name for name in have.keys() | shapes.keys() if have.get(name) != shapes.get(name)):
        name = wrong[0]
        raise ConfigError(
            f"model.lora.path {path!r}: {len(wrong)} tensors differ from those of this model with model.lora.targets "
            f"{list(spec.targets)}, first {name!r} with shape {have.get(name)} there and {shapes.get(name)} here; its "
            f"targets are {list(there.targets)}"
        )
    return found


def initial_values(spec: AdapterSpec, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of an adapter with its first values, whole and float32 on the CPU: those of `AdapterSpec.path`, or
    random A and zero B. They depend on the seed and the tensor's name, and not on how a model is split.

    Args:
        spec: of the adapter.
        shapes: of its whole tensors in this model.
        seed: of the run.
    """
    if spec.path is not None:
        yield from read_adapter(spec, shapes).items()
        return
    for name, shape in shapes.items():
        if ".lora_B." in name:
            yield name, torch.zeros(shape)
            continue
        digest = hashlib.sha256(f"{seed} adapter {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if spec.init == "gaussian":
            yield name, torch.randn(shape, generator=generator) / spec.rank
        else:
            # Kaiming-uniform with a = sqrt(5), as torch's linear layers begin: bound 1 / sqrt(in).
            yield name, (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def write_merged(spec: ModelSpec, adapter: Path, target: Path) -> None:
    """Writes a model with an adapter added to its weights as a Hugging Face folder, one tensor at a time.

    Args:
        spec: the model without the adapter; `dtype` is that of the result.
        adapter: folder in PEFT's format.
        target: folder to write.

    Raises:
        ConfigError: the model or the adapter cannot be read, or they do not belong together.
    """
    model = build_model(spec)
    parameters, _ = canonical_parameters(model)
    own, shapes = spec_of(adapter), dict[str, tuple[int, ...]]()
    modules = {name.rpartition(".lora_")[0] for name in _names(adapter)}
    for module in sorted(modules):
        weight = parameters.get(f"{module}.weight")
        if weight is None or weight.dim() != 2:
            raise ConfigError(f"adapter {str(adapter)!r}: {module!r} is no linear layer of the model {spec.path!r}")
        shapes[f"{module}.lora_A.weight"] = (own.rank, weight.shape[1])
        shapes[f"{module}.lora_B.weight"] = (weight.shape[0], own.rank)
    low = read_adapter(own, shapes)
    buffers = persistent_buffers(model)
    tensors = in_dtype({name: p.shape for name, p in parameters.items()}, getattr(torch, spec.dtype))
    tensors += [ExportedTensor(name=name, shape=tuple(b.shape), dtype=b.dtype) for name, b in buffers.items()]

    def fetch(tensor: ExportedTensor, _: int) -> Tensor:
        if tensor.name in buffers:
            return buffers[tensor.name]
        module, values = tensor.name.removesuffix(".weight"), parameters[tensor.name].detach()
        if module not in modules:
            return values
        return merged(values, low[f"{module}.lora_A.weight"], low[f"{module}.lora_B.weight"], own.scale)

    write_model(target, model.config, tensors, fetch, source=spec.path)


def _names(adapter: Path) -> Iterator[str]:
    try:
        with safe_open(adapter / WEIGHTS, framework="pt") as file:
            yield from (name.removeprefix(_PREFIX) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"adapter {str(adapter)!r}: {WEIGHTS} could not be read: {error}") from error
