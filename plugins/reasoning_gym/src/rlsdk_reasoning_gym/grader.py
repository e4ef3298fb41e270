"""Grades reasoning-gym's tasks strictly: text around the correct answer is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from math import isfinite
from typing import Any

from rlsdk.interfaces import RewardSample
from rlsdk.rewards import evaluates_text, final_answer, parse_number, prepared_by
from rlsdk_reasoning_gym.library import import_reasoning_gym
from rlsdk_reasoning_gym.scorers import SAFE_ROWS, SCORERS, Scorer

MAX_CHARS = 16_384
"""Longer responses score 0."""
FEWER_CHARS = {"propositional_logic": 1_000, "rubiks_cube": 2_000, "rush_hour": 2_000}
"""Lower limits for tasks whose scorer's time grows faster than the response."""
HUGE = re.compile(r"[eE][+-]?[\d_]{4,}")
"""A large power of ten, which a scorer may expand to all its digits: `Fraction("1e999999999")`."""
MANY_TIMES = {"rubiks_cube": re.compile(r"\d{3,}"), "rush_hour": re.compile(r"\d{3,}")}
"""A large repeat count of a move, in tasks whose scorer simulates moves one by one."""
NO_NUMBER = re.compile("nan", re.IGNORECASE)
"""Text that `float` parses as NaN. Comparisons with NaN are always False."""
BY_DISTANCE = frozenset({"complex_arithmetic", "number_sorting"})
"""Tasks whose scorers accept a number unless its distance is too large; the distance of a NaN never is."""
PROBE = "?"
"""Not the answer of any task. A scorer that accepts it accepts anything, so its verdict does not count."""
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""Errors that scorers raise on a response that they cannot parse. The response is wrong; the grader has not failed."""


def _import_tasks() -> Mapping[str, Any]:
    """Returns the registry of tasks. Importing it takes seconds if byte-code is not cached."""
    tasks: Mapping[str, Any] = import_reasoning_gym().DATASETS
    return tasks


@prepared_by(_import_tasks)
def reasoning_gym(sample: RewardSample, *, exact: bool = True, partial: float = 0.0) -> float:
    """Returns 1 if the response answers the task, else `partial` times the score of the task's scorer.

    The answer is what `final_answer` finds, or the whole response if it has no mark.

    Args:
        sample: its row is the task's item: `question`, `answer`, and `metadata` with `source_dataset`.
        exact: require the reference answer (as text, or as an exact number), or another answer that the task's scorer
            fully accepts and that is not just text around the reference. False: return the score of the scorer.
        partial: weight of the scorer's partial credit for wrong answers; for shaped rewards.

    Raises:
        ValueError: the row does not come from reasoning-gym, the installed version lacks its task, or the task's scorer
            may run text as Python.
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
    return min(_score(given, sample), 1.0)


def _compare(given: str, answer: str | None) -> bool | None:
    """Whether the response is the reference answer, as text or as an exact number; None if the scorer must decide."""
    if answer is None:
        return None
    if given == answer.strip():
        return True
    wanted = parse_number(answer)
    return None if wanted is None else parse_number(given) == wanted


def _is_another_answer(given: str, sample: RewardSample) -> bool:
    """Whether a response that the task's scorer accepts is an answer.

    It is not if it contains the reference, is a piece of the question, or is much longer than the reference.
    """
    if sample.answer is None:
        return True
    question = str(sample.row.get("question", ""))
    return len(given) <= 4 * len(sample.answer) + 64 and sample.answer.strip() not in given and given not in question


def _score(given: str, sample: RewardSample) -> float:
    """Returns the task's score of a response; 0 if it cannot be parsed or must not be passed to the scorer."""
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
    """Whether a scorer would wrongly accept the response, or need too long for it.

    Slow responses that this check misses end at the time or memory limit.
    """
    if len(given) > FEWER_CHARS.get(task, MAX_CHARS) or HUGE.search(given):
        return True
    if task in BY_DISTANCE and NO_NUMBER.search(given):
        return True
    return task in MANY_TIMES and MANY_TIMES[task].search(given) is not None


@cache
def _scorer(task: str) -> Scorer:
    """Returns our scorer if the library's would run text as Python, else the library's.

    Raises:
        ValueError: there is no such task, or its scorer runs text and has no replacement.
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
            f"replacement for it; use another task, or your own reward"
        )
    return scorer
