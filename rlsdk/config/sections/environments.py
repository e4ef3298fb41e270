"""What `rollout.environment` does not go together with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rlsdk.config.problem import Problem
from rlsdk.config.sections.evaluation import Measure
from rlsdk.config.sections.rewards import RewardConfig
from rlsdk.interfaces import ENVIRONMENT_REWARD

BECAUSE = "because environments and agents write the chat with the tokenizer's template"


def environment_problems(
    rewards: tuple[RewardConfig, ...], data: Any, measures: Iterable[Measure]
) -> Iterator[Problem]:
    """Problems of a run of an environment or an agent.

    Args:
        rewards: of the run: none may have the name of the environment's score.
        data: section `data`.
        measures: its evaluations, whose chats are written like those of training.
    """
    for at, reward in enumerate(rewards):
        if reward.title == ENVIRONMENT_REWARD:
            yield Problem(
                f"rewards.{at}.label",
                value=reward.label,
                expected=f"another label: {ENVIRONMENT_REWARD!r} is the score of the environment or agent",
            )
    if data.chat_template == "never":
        yield Problem("data.chat_template", value="never", expected=f"auto, {BECAUSE}")
    if data.allow_special_tokens:
        yield Problem("data.allow_special_tokens", value=True, expected=f"false, {BECAUSE}, and texts stay texts")
    for measure in measures:
        own = getattr(measure.config, "chat_template_kwargs", None)
        if own is not None:
            expected = f"null, {BECAUSE} and data.chat_template_kwargs"
            yield Problem(f"{measure.field}.chat_template_kwargs", value=own, expected=expected)
