"""verl's commands and YAML files as settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.migrate.draft import Script, Setting
from rlsdk.migrate.flags import assignments, flags, flat

PEER = "verl"
_MODULE = re.compile(
    r"(?:verl|recipe)[\w.]*\.(main_(?!gen|eval)\w+|\w*sft_trainer\w*)|(?:\S*/)?(main_ppo|main_dapo|\w*sft_trainer)\.py"
)


def is_command(words: Sequence[str]) -> bool:
    """Whether these words start a training with verl."""
    return any(_MODULE.fullmatch(word) for word in words) and any("=" in word for word in words)


def of_command(words: Sequence[str], source: str) -> Script:
    """The settings of `python -m verl.trainer.main_ppo key=value ...`."""
    at = next(at for at, word in enumerate(words) if _MODULE.fullmatch(word))
    settings = assignments(words[at + 1 :], source)
    launch = flags(words[:at], source, {}) if "torchrun" in words[:at] else {}
    for word in words[at + 1 :]:
        if option := re.fullmatch(r"(--config-(?:name|path|dir))=(.*)", word):
            settings[option[1]] = Setting(name=option[1], value=option[2], where=source)
    settings |= {f"torchrun.{name}": Setting(name=f"torchrun.{name}", value=one.value, where=source)
                 for name, one in launch.items()}  # fmt: skip
    return _script(settings, words[at], source)


def is_tree(tree: Mapping[str, Any]) -> bool:
    """Whether a YAML file has verl's sections."""
    return "actor_rollout_ref" in tree or (isinstance(tree.get("data"), dict) and "train_files" in tree["data"])


def of_tree(tree: Mapping[str, Any], lines: Mapping[Any, int], source: str) -> Script:
    """The settings of one of verl's YAML files."""
    found = {}
    for name, value in flat({key: item for key, item in tree.items() if key not in ("defaults", "hydra")}).items():
        line = lines.get(tuple(name.split(".")))
        found[name] = Setting(name=name, value=value, where=f"{source}:{line}" if line else source)
    return _script(found, "main_ppo" if "actor_rollout_ref" in tree else "fsdp_sft_trainer", source)


def _script(settings: dict[str, Setting], module: str, source: str) -> Script:
    command = "sft" if "sft" in module else "train"
    return Script(peer=PEER, source=source, command=command, trainer=module, settings=settings)
