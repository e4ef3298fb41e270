"""Checks of the rewards before a worker exists: their source code, and which rows they can grade."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from rlsdk.config import Problem, RewardConfig
from rlsdk.data import DataRow
from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.interfaces.spelling import Setting
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rewards import applies_to
from rlsdk.rewards.functions.inspection import inspect_target
from rlsdk.rewards.functions.signatures import Form, describe_form

_RATIONALE = re.compile(r"\S\s*\n####[ \t]*\S+\s*$")
"""Text, then a last line with the answer, as in GSM8K."""
MOSTLY = 0.9
"""Share of the rows."""
MOST_ROWS = 1_000
"""Largest number of rows to check, drawn with a fixed seed: a systematic problem shows in few rows."""


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
            notices += [] if form is Form.OWN else [describe_form(form, reward.title)]
    return problems, notices


def check_gradable(
    rewards: Sequence[RewardConfig],
    rows: Sequence[DataRow],
    registry: Registry,
    *,
    field: str = "rewards",
    only: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Calls each registered reward that declares `checks_rows` with an empty response to each row.

    Args:
        rewards: rewards of the run, or of an evaluation set.
        rows: rows to grade, with their answers (`PromptFormat.select`).
        registry: the installed backends and components.
        field: configuration field with the rewards, for messages.
        only: whether a registered name may be imported here.

    Returns:
        Notices about rewards that cannot grade some of the rows.

    Raises:
        ConfigError: a reward can grade none of the rows that it applies to.
    """
    notices = []
    for at, reward, function in _asked(rewards, registry, only):
        own = [row for row in rows if applies_to(reward.rows, row.row)]
        own = [own[i] for i in sorted(Random(0).sample(range(len(own)), min(len(own), MOST_ROWS)))]
        faults = [(row, fault) for row in own if (fault := _fault(function, row)) is not None]
        if not faults:
            continue
        row, fault = faults[0]
        if len(faults) == len(own):
            raise ConfigError(
                f"{field}.{at} ({reward.title}): none of the {len(own):,} rows looked at can be graded; the first, "
                f"{row.source}: {fault}. The fields of that row are {sorted(row.row)}"
            )
        notices.append(
            f"{reward.title}: {len(faults):,} of {len(own):,} rows looked at cannot be graded, and their samples will "
            f"count as failed (reward_limits.on_failure); the first, {row.source}: {fault}"
        )
    return notices


def rationale_notices(rewards: Sequence[RewardConfig], rows: Sequence[DataRow]) -> Iterator[str]:
    """Says where functions in verl's form get answers as GSM8K has them: verl's own data holds the number alone, so
    such a function compares a response with the whole rationale, which no response equals."""
    answers = [row.answer for row in rows if row.answer is not None]
    long = [answer for answer in answers if _RATIONALE.search(answer)]
    if len(long) < MOSTLY * max(len(answers), 1):
        return
    for reward in rewards:
        if ":" in reward.name and "://" not in reward.name and inspect_target(reward.name, reward.options) is Form.VERL:
            yield (
                f"reward {reward.title}: its ground_truth is a rationale, and the answer stands behind `####` "
                f"({long[0][-40:]!r}): no response equals it unless the function takes "
                "`ground_truth.split('####')[-1].strip()`. The built-in reward gsm8k reads such answers: "
                f"`{Setting('reward', 'gsm8k')}`"
            )


def _asked(
    rewards: Sequence[RewardConfig], registry: Registry, only: Callable[[str], bool]
) -> Iterator[tuple[int, RewardConfig, Any]]:
    for at, reward in enumerate(rewards):
        if ":" in reward.name or reward.is_remote or reward.weight == 0 or not only(reward.name):
            continue
        function = registry.component(ComponentKind.REWARD, reward.name)
        if getattr(function, "checks_rows", False):
            yield at, reward, partial(function, **reward.options)


def _fault(function: Any, row: DataRow) -> str | None:
    prompt = row.prompt if isinstance(row.prompt, str) else ""
    try:
        function(RewardSample(prompt=prompt, response="", answer=row.answer, row=row.row, truncated=False))
    except ConfigError:  # of the options: `refused_options` reports it
        return None
    except ValueError as error:
        return str(error)
    except Exception:  # Another kind of error, perhaps of the options; the grading process reports it with a traceback.
        return None
    return None
