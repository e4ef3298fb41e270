"""Rewards before anything starts: what their source shows."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.config import Problem, RewardConfig
from rlsdk.interfaces import ConfigError
from rlsdk.rewards.inspection import inspect_target
from rlsdk.rewards.signatures import Form, said_of


def inspect_rewards(rewards: Sequence[RewardConfig], field: str = "rewards") -> tuple[list[Problem], list[str]]:
    """What is wrong with rewards that are named by file or module, read from their source, and what to say of them.

    Nothing of a user is run, and registered names are not looked at: `check_run` does that.

    Args:
        rewards: of the run, or of one of its evaluation sets.
        field: of the configuration that holds them.
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
