"""Grading of reasoning-gym's tasks: right or wrong, not "contains the answer somewhere"."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.answer import final_answer, parse_number
from rlsdk.rewards.load import prepared_by

MAX_CHARS = 16_384
"""Longer responses answer no task."""
PROBE = "?"
"""No task has it for an answer. A scorer that finds it right finds anything right."""
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What scorers raise on a response that they cannot read: a wrong response, not a failed grader."""


def _import_tasks() -> Mapping[str, Any]:
    """The registry of tasks: importing it takes seconds where byte-code is not kept."""
    with warnings.catch_warnings():
        # A dependency compares with `is`, which Python complains of when it compiles it.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS
    tasks: Mapping[str, Any] = DATASETS
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
    the question, no rambling, and not the word of a scorer that finds anything right."""
    if sample.answer is not None:
        longest = 4 * len(sample.answer) + 64
        question = str(sample.row.get("question", ""))
        if len(given) > longest or sample.answer.strip() in given or given in question:
            return False
    return _score(PROBE, sample) < 1.0


def _score(given: str, sample: RewardSample) -> float:
    """The task's own score of a response; 0 where it cannot read it, or where it might run it as Python."""
    metadata = sample.row.get("metadata")
    task = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not isinstance(task, str):
        raise ValueError("the data row has no metadata.source_dataset: it does not come from reasoning-gym")
    if "__" in given or len(given) > MAX_CHARS:
        return 0.0
    scorer = _scorer(task)
    try:
        return float(scorer(given, dict(sample.row)))
    except UNREADABLE:
        return 0.0


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    if task not in _import_tasks():
        raise ValueError(f"the installed reasoning-gym has no task {task!r}")
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer
