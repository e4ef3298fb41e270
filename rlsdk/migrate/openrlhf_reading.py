"""OpenRLHF's commands as settings, under their names of today."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlsdk.migrate.draft import Script, Setting
from rlsdk.migrate.flags import flags
from rlsdk.migrate.openrlhf_tables import MODULES, OLD, OLD_SWITCHES

PEER = "OpenRLHF"
_MODULE = re.compile(r"(?:openrlhf\.cli\.|(?:\S*/)?)(train_(?:ppo_ray|ppo|sft|dpo|rm))(?:\.py)?")


def is_command(words: Sequence[str]) -> bool:
    """Whether these words start a training with OpenRLHF."""
    return any(_MODULE.fullmatch(word) for word in words) and any(word.startswith("--") for word in words)


def of_command(words: Sequence[str], source: str) -> Script:
    """The settings of `python -m openrlhf.cli.train_ppo_ray --flags`, whatever starts it."""
    at, module = next((at, found[1]) for at, word in enumerate(words) if (found := _MODULE.fullmatch(word)))
    settings = flags(words[at + 1 :], source, OLD, dashes=False)
    for switch, (name, value) in OLD_SWITCHES.items():
        if (one := settings.pop(switch, None)) is not None:
            settings[name] = Setting(name=name, value=value, where=one.where)
    command = MODULES[module]
    if command != "train":
        own = {"actor.model_name_or_path": "model.model_name_or_path",
               "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable"}  # fmt: skip
        settings = {own.get(name, name): Setting(name=own.get(name, name), value=one.value, where=one.where)
                    for name, one in settings.items()}  # fmt: skip
    else:
        settings = {_of_actor(name): Setting(name=_of_actor(name), value=one.value, where=one.where)
                    for name, one in settings.items()}  # fmt: skip
    launch = flags(words[:at], source, {}) if words[0] in ("torchrun", "deepspeed") else {}
    settings |= {f"launcher.{name}": Setting(name=f"launcher.{name}", value=one.value, where=source)
                 for name, one in launch.items() if name not in ("module",)}  # fmt: skip
    return Script(peer=PEER, source=source, command=command, trainer=module, settings=settings)


def _of_actor(name: str) -> str:
    """Flat names of the optimizer mean the actor's in reinforcement learning."""
    return (
        f"actor.{name}"
        if name in ("adam.betas", "adam.weight_decay", "lr_scheduler", "lr_warmup_ratio", "max_norm")
        else name
    )
