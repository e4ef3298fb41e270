"""Checks the source code of rewards before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.config import Problem, RewardConfig
from rlsdk.interfaces import ConfigError
from rlsdk.rewards.inspection import inspect_target
from rlsdk.rewards.signatures import Form, said_of


def inspect_rewards(rewards: Sequence[RewardConfig], field: str = "rewards") -> tuple[list[Problem], list[str]]:
    """Returns problems and notices about rewards that are named by file or module, found in their source.

    Runs no user code and ignores registered names, which `check_run` checks.

    Args:
        rewards: rewards of the run, or of one of its evaluation sets.
        field: configuration field with the rewards, for messages.
    """
    problems, notices = list[Problem](), list[str]()
    for at, reward in enumerate(rewards):
        if ":" not in reward.name or "://" in reward.name:
            continue
        try:
            form = inspect_target(reward.name, reward.options)
        except ConfigError as error:
            problems.append(Problem(f"{field}.{at}", str(error)))
        else:
            notices += [] if form is Form.OWN else [said_of(form, reward.title)]
    return problems, notices
