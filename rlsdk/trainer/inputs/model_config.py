"""Reads the `config.json` of models, before anything is loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.config import Problem, Role, RunConfig
from rlsdk.config.problem import shown
from rlsdk.interfaces import ConfigError, RolloutSpec, nearest
from rlsdk.interfaces.spelling import Setting, spell
from rlsdk.kit.files.adapter_config import check_no_adapter, holds_adapter, settings_of
from rlsdk.kit.files.model_files import has_chat_template, tokenizer_fault, weights_fault
from rlsdk.kit.model.shapes import count_parameters, is_shape, shape_fields
from rlsdk.system.files import read_regular
from rlsdk.trainer.checkpoints.checkpoint import is_model

SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size")  # fmt: skip
"""Fields of a `config.json` that determine the shapes of tensors."""
HUB_NAME = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/\w[\w.-]*)?")


def model_fields(config: RunConfig) -> Mapping[str, Any]:
    """`config.json` of the model, from a folder or the hub. Empty if the configuration names no model.

    Raises:
        ConfigError: the folder holds no model; or there is none, and the hub has no model of this name either.
    """
    return {} if config.model.path is None else fields_of(config.model.path, config.model.revision, "model.path")


def other_models(config: RunConfig, table: Sequence[Role]) -> Mapping[str, Mapping[str, Any]]:
    """`config.json` by role, of every role of the table whose model is not the policy's.

    Raises:
        ConfigError: as `model_fields`.
    """
    return {
        role.name: fields_of(role.model.path, role.model.revision, role.fields["path"])
        for role in table
        if role.model.path != (config.model.path or "")
    }


def fields_of(path: str, revision: str | None, field: str) -> Mapping[str, Any]:
    """`config.json` of a model, from a folder, the hub or the table of shapes; errors begin with the name of the field.

    Raises:
        ConfigError: the folder holds no model; or there is none, and the hub has no model of this name either.
    """
    folder = Path(path)
    if not path.strip():
        raise ConfigError(f"{field} {path!r}: is empty; expected a folder, or a name on the hub")
    if is_shape(path):
        return shape_fields(path)
    if not os.path.isdir(path):  # unlike `Path.is_dir`, no error for a name that is too long
        near = nearest_folder(folder)
        if not HUB_NAME.fullmatch(path):
            raise ConfigError(
                f"{field} {shown(path)}: no such folder{near}, and not the name of a model on the hub, which is name "
                "or org/name"
            )
        from rlsdk.kit.files.hub import fetch_model_config

        try:
            return fetch_model_config(path, revision, field=field)
        except ConfigError as error:
            raise ConfigError(f"{error}{near}") from error.__cause__
    try:
        fields: Mapping[str, Any] = json.loads(read_regular(folder / "config.json"))
        found = {**fields, "model_type": str(fields["model_type"])}
    except FileNotFoundError as error:
        inside = folder / "model"  # where a checkpoint of a run has it
        if holds_adapter(folder):
            hint = "it is an adapter: give " + spell(*(Setting(*pair) for pair in settings_of(folder).items()))
        elif is_model(inside):
            hint = f"give {str(inside)!r}"
        else:
            hint = "expected a folder in Hugging Face format"
        raise ConfigError(f"{field}: {str(folder)!r} holds no config.json; {hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{field}: {str(folder)!r} has no config.json with a model_type ({type(error).__name__}: {error}); copy or "
            "download it again"
        ) from error
    check_no_adapter(folder, field)
    return found


def nearest_folder(path: Path) -> str:
    """``"; did you mean 'x'?"`` for the folder of the nearest name beside one that is not there, or nothing."""
    try:
        return nearest(path.name, [entry.name for entry in path.parent.iterdir() if entry.is_dir()])
    except OSError:
        return ""


def file_problems(config: RunConfig, table: Sequence[Role]) -> Iterator[Problem]:
    """What is wrong with the files of these roles' models, and of the policy's tokenizer, that are folders here: found
    by names, sizes and headers, before a device is taken for them."""
    seen = set[str]()
    for role in table:
        spec, folder = role.spec, Path(role.model.path)
        loads = spec.load_weights if isinstance(spec, RolloutSpec) else not spec.init_from_config
        if loads and str(folder) not in seen and os.path.isdir(folder):
            seen.add(str(folder))
            if fault := weights_fault(folder):
                yield Problem(role.fields["path"], f"{str(folder)!r}: {fault}")
    name = config.model.tokenizer or config.model.path or ""
    field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    if os.path.isdir(name):
        # Code that comes with a model may make its tokenizer of anything.
        if not config.model.trust_remote_code and (fault := tokenizer_fault(Path(name))):
            yield Problem(field, f"{name!r}: {fault}")
    elif config.model.tokenizer is not None and not HUB_NAME.fullmatch(name):
        near = nearest_folder(Path(name))
        yield Problem(field, f"no such folder{near}, and not the name of a model on the hub", value=name)


def chat_template_known(config: RunConfig) -> bool | None:
    """Whether the policy's tokenizer has a chat template; None: not known before it is loaded."""
    folder = Path(config.model.tokenizer or config.model.path or "")
    if config.model.trust_remote_code or not config.model.path or not folder.is_dir():
        return None
    return has_chat_template(folder)


def quantized_base(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """An adapter on weights that are stored quantized (QLoRA), which no train backend loads; says what the model needs
    in bfloat16 instead.

    Args:
        config: the run.
        model: `config.json` of the policy.
    """
    stored = model.get("quantization_config")
    if not config.model.lora.rank or not isinstance(stored, Mapping):
        return
    size = count_parameters(model)
    needs = "" if size is None else f", which needs about {2 * size / 1e9:.1f} GB besides activations,"
    yield Problem(
        "model.lora.rank",
        f"{config.model.lora.rank}: the weights of {config.model.path!r} are quantized "
        f"({stored.get('quant_method', 'quantization_config')}), and adapters stand beside weights in model.dtype (no "
        f"QLoRA): give the same model in bfloat16 as model.path{needs} and model.dtype bfloat16",
    )


def check_same_model(config: RunConfig, checkpoint: Path) -> None:
    """Refuses to continue from a checkpoint of a model with other shapes, before anything is started.

    A checkpoint without a model in Hugging Face format is left to the engine, which compares every tensor.

    Raises:
        ConfigError: names the differing fields of `config.json`.
    """
    file = checkpoint / "model" / "config.json"
    if config.model.path is None or not file.is_file():
        return
    here, there = model_fields(config), fields_of(str(file.parent), None, "trainer.resume")
    known = [name for name in SHAPE if here.get(name) is not None and there.get(name) is not None]
    differ = [f"{name} {there[name]!r} there and {here[name]!r} here" for name in known if here[name] != there[name]]
    if differ:
        raise ConfigError(
            f"model.path {config.model.path!r}: {str(checkpoint)!r} was saved from another model "
            f"({', '.join(differ)}); resume with the model that it was saved from, or start from scratch: "
            f"{Setting('trainer.resume', 'never')}, or another {Setting('trainer.run_name')}"
        )
