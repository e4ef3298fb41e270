"""Registers the data source and the reward. Imports neither them nor the library."""

from __future__ import annotations

from rlsdk.interfaces import RegisterComponent, hookimpl

NEEDS = {"requires": "reasoning-gym", "install_hint": "pip install rlsdk-reasoning-gym"}


@hookimpl
def rlsdk_register_datasets(register: RegisterComponent) -> None:
    register(
        "reasoning_gym",
        "rlsdk_reasoning_gym.source:load_reasoning_gym",
        "A task of reasoning-gym, by name; its rows are generated.",
        **NEEDS,
    )


@hookimpl
def rlsdk_register_rewards(register: RegisterComponent) -> None:
    register(
        "reasoning_gym",
        "rlsdk_reasoning_gym.grader:reasoning_gym",
        "1 if the task's grader accepts the answer.",
        **NEEDS,
    )
