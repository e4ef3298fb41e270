"""Reinforcement-learning post-training of language models in which every heavy engine is a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlsdk.moved import keep_old_names
from rlsdk.system.metadata import tolerate_damaged_metadata
from rlsdk.version import __version__

if TYPE_CHECKING:
    from rlsdk.api import (
        Chart,
        Quiet,
        RewardSample,
        RlsdkError,
        Run,
        Table,
        distill,
        doctor,
        dpo,
        evaluate,
        generate,
        kto,
        make_model,
        plan,
        plugins,
        process_reward,
        reward_model,
        sft,
        train,
    )

# Before anything imports pydantic or torch, in every process that has to do with rlsdk.
tolerate_damaged_metadata()
keep_old_names()

__all__ = [
    "Chart",
    "Quiet",
    "RewardSample",
    "RlsdkError",
    "Run",
    "Table",
    "__version__",
    "distill",
    "doctor",
    "dpo",
    "evaluate",
    "generate",
    "kto",
    "make_model",
    "plan",
    "plugins",
    "process_reward",
    "reward_model",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports the API when it is used: plugins and commands import this package, too, and must stay light."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'rlsdk' has no attribute {name!r}{_instead(name)}")
    from rlsdk import api

    return getattr(api, name)


def _instead(name: str) -> str:
    """What a class of another trainer is here."""
    if not name.endswith(("Trainer", "Config")):
        return ""
    from rlsdk.config.loading.foreign_names import CLASSES

    return f"; here: {CLASSES[name]}" if name in CLASSES else ""


def __dir__() -> list[str]:
    return sorted(__all__)
