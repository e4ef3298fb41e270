"""Reinforcement-learning post-training of language models in which every heavy engine is a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.api import (
        Chart,
        Run,
        Table,
        doctor,
        dpo,
        evaluate,
        generate,
        plan,
        plugins,
        reward_model,
        sft,
        train,
    )
    from rlsdk.interfaces import RewardSample

__version__ = "0.1.0"

__all__ = [
    "Chart",
    "RewardSample",
    "Run",
    "Table",
    "__version__",
    "doctor",
    "dpo",
    "evaluate",
    "generate",
    "plan",
    "plugins",
    "reward_model",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports the API when it is used: plugins and commands import this package, too, and must stay light."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'rlsdk' has no attribute {name!r}")
    if name == "RewardSample":
        from rlsdk.interfaces import RewardSample

        return RewardSample
    from rlsdk import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
