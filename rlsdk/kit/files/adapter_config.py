"""The configuration of an adapter on disk, `adapter_config.json` of PEFT. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.interfaces import AdapterSpec, ConfigError
from rlsdk.system.files import read_regular

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
}
"""Fields of PEFT's configuration that must have one of these values: others are another kind of adapter."""


def holds_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter in PEFT's format."""
    return (folder / CONFIG).is_file()


def check_no_adapter(folder: Path, field: str) -> None:
    """Checks that the folder of a model has no adapter beside its weights: with PEFT installed, transformers would load
    the adapter's own base in place of these weights, and the adapter into it; without, these weights alone.

    Raises:
        ConfigError: it has one.
    """
    if holds_adapter(folder):
        raise ConfigError(
            f"{field}: {str(folder)!r} holds both a model (config.json) and an adapter ({CONFIG}), and it does not say "
            f"which is meant. Move {CONFIG} and {WEIGHTS} to a folder of their own: without them the model is loaded "
            "as it is; to start from the adapter, give that folder as model.lora.path"
        )


def read_adapter_config(folder: str | Path) -> Mapping[str, Any]:
    """Content of `adapter_config.json`.

    Raises:
        ConfigError: it cannot be read, or is not one of a plain low-rank adapter.
    """
    try:
        found = json.loads(read_regular(Path(folder) / CONFIG))
        if not isinstance(found, dict) or found.get("peft_type") != "LORA" or not isinstance(found.get("r"), int):
            raise ValueError("expected an object with peft_type 'LORA' and a number r")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.lora.path {str(folder)!r}: {CONFIG} could not be read: {error}; give a folder that PEFT wrote"
        ) from error
    for name, valid in _PLAIN.items():
        if found.get(name) not in valid:
            raise ConfigError(
                f"model.lora.path {str(folder)!r}: {name} is {found[name]!r} in its {CONFIG}, which is another kind of "
                "adapter; merge it into the model with PEFT (merge_and_unload), and give that as model.path"
            )
    return found


def spec_of(folder: str | Path) -> AdapterSpec:
    """The adapter in a folder, as what an engine loads.

    Raises:
        ConfigError: see `read_adapter_config`.
    """
    found = read_adapter_config(folder)
    targets = found.get("target_modules") or ()
    return AdapterSpec(
        rank=found["r"],
        alpha=float(found.get("lora_alpha", 8)),
        scaling="rslora" if found.get("use_rslora") else "standard",
        targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        path=str(folder),
    )


def settings_of(folder: Path) -> dict[str, Any]:
    """Fields of the configuration, by path, for the model with the adapter in a folder.

    Raises:
        ConfigError: see `read_adapter_config`; or it does not name its model.
    """
    found, spec = read_adapter_config(folder), spec_of(folder)
    base = found.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ConfigError(f"{str(folder)!r} is an adapter whose {CONFIG} names no base_model_name_or_path; write it in")
    fields = {name: getattr(spec, name) for name in ("rank", "alpha", "scaling", "path")}
    return {
        "model.path": base,
        "model.revision": found.get("revision"),
        "model.lora.targets": list(spec.targets),
        **{f"model.lora.{name}": value for name, value in fields.items()},
    }
