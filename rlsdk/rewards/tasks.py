"""Grading of reasoning-gym's tasks: right or wrong, not "contains the answer somewhere"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from math import isfinite
from typing import Any

from rlsdk.interfaces import RewardSample
from rlsdk.registry.task_library import import_reasoning_gym
from rlsdk.rewards.answer import final_answer, parse_number
from rlsdk.rewards.load import prepared_by
from rlsdk.rewards.task_scorers import SAFE_ROWS, SCORERS, Scorer
from rlsdk.rewards.text_evaluation import evaluates_text

MAX_CHARS = 16_384
"""Longer responses answer no task."""
FEWER_CHARS = {"propositional_logic": 1_000, "rubiks_cube": 2_000, "rush_hour": 2_000}
"""Where a scorer's time grows faster than the response."""
HUGE = re.compile(r"[eE][+-]?[\d_]{4,}")
"""A power of ten that a scorer may write out: `Fraction("1e999999999")`."""
MANY_TIMES = {"rubiks_cube": re.compile(r"\d{3,}"), "rush_hour": re.compile(r"\d{3,}")}
"""A move so many times over, in tasks whose scorer makes them one by one."""
NO_NUMBER = re.compile("nan", re.IGNORECASE)
"""`float` reads it as a number that is neither nearer nor farther than any other."""
BY_DISTANCE = frozenset({"complex_arithmetic", "number_sorting"})
"""Tasks whose scorers find a number right unless it is too far away: a NaN never is."""
PROBE = "?"
"""No task has it for an answer. A scorer that finds it right finds anything right, and gives no partial credit."""
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What scorers raise on a response that they cannot read: a wrong response, not a failed grader."""


def _import_tasks() -> Mapping[str, Any]:
    """The registry of tasks: importing it takes seconds where byte-code is not kept."""
    tasks: Mapping[str, Any] = import_reasoning_gym().DATASETS
    return tasks


@prepared_by(_import_tasks)
def reasoning_gym(sample: RewardSample, *, exact: bool = True, partial: float = 0.0) -> float:
    """1 when the response answers the task; `partial` times the task's own score otherwise.

    The answer is what `final_answer` finds, or the whole response where nothing is marked.

    Args:
        sample: its row is the task's item: `question`, `answer`, and `metadata` with `source_dataset`.
        exact: True: equal to the reference answer (as text, or as an exact number), or another answer that the task's
            scorer finds fully right and that is no text around the reference. False: whatever the scorer gives.
        partial: weight of the scorer's partial credit where the answer is not right; for shaped rewards.

    Raises:
        ValueError: the row does not come from reasoning-gym, or its task is not installed.
    """
    marked = final_answer(sample.response)
    given = sample.response.strip() if marked is None else marked
    if exact:
        right = _compare(given, sample.answer)
        if right or (right is False and partial == 0.0):
            return float(right)
        score = _score(given, sample)
        if score >= 1.0 and _score(PROBE, sample) >= 1.0:
            return 0.0
        if right is None and score >= 1.0 and _is_another_answer(given, sample):
            return 1.0
        return partial * min(score, 1.0)
    return _score(given, sample)


def _compare(given: str, answer: str | None) -> bool | None:
    """Whether the response is the reference answer, as text or as an exact number; None when the task must say."""
    if answer is None:
        return None
    if given == answer.strip():
        return True
    wanted = parse_number(answer)
    return None if wanted is None else parse_number(given) == wanted


def _is_another_answer(given: str, sample: RewardSample) -> bool:
    """Whether a response that the task's scorer finds right is an answer: no text around the reference, no piece of
    the question and no rambling."""
    if sample.answer is None:
        return True
    question = str(sample.row.get("question", ""))
    return len(given) <= 4 * len(sample.answer) + 64 and sample.answer.strip() not in given and given not in question


def _score(given: str, sample: RewardSample) -> float:
    """The task's score of a response; 0 where it cannot be read or must not be handed to its scorer."""
    metadata = sample.row.get("metadata")
    task = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not isinstance(task, str):
        raise ValueError("the data row has no metadata.source_dataset: it does not come from reasoning-gym")
    scorer = _scorer(task)
    if _is_refused(given, task):
        return 0.0
    try:
        score = float(scorer(given, dict(sample.row)))
    except UNREADABLE:
        return 0.0
    return score if isfinite(score) else 0.0


def _is_refused(given: str, task: str) -> bool:
    """Screens what a scorer would wrongly find right, or would be busy with for long; what is missed of the latter runs
    into the time or memory limit."""
    if len(given) > FEWER_CHARS.get(task, MAX_CHARS) or HUGE.search(given):
        return True
    if task in BY_DISTANCE and NO_NUMBER.search(given):
        return True
    return task in MANY_TIMES and MANY_TIMES[task].search(given) is not None


@cache
def _scorer(task: str) -> Scorer:
    """Ours where the library's would run text as Python; the library's otherwise.

    Raises:
        ValueError: no such task, or one whose scorer runs text and that has no replacement.
    """
    if task not in _import_tasks():
        raise ValueError(f"the installed reasoning-gym has no task {task!r}")
    if task in SCORERS:
        return SCORERS[task]
    scorer: Scorer = import_reasoning_gym().get_score_answer_fn(task)
    if task in SAFE_ROWS:
        return lambda given, row: scorer(given, SAFE_ROWS[task](row))
    name = evaluates_text(scorer)
    if name is not None:
        raise ValueError(
            f"reasoning-gym's scorer of {task!r} may run text as Python (it uses {name!r}), and rlsdk has no "
            f"replacement for it; use another task, or a reward of your own"
        )
    return scorer
