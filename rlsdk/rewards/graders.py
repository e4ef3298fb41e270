"""Graders of word problems and multiple choice: exact, and cheap enough to run on every sample."""

from __future__ import annotations

import re

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.answer import final_answer, parse_number

_LETTER = re.compile(r"(?:\\text\{)?\(?([A-Za-z])\)?\}?\.?")


def gsm8k(sample: RewardSample) -> float:
    r"""1 when the response's final number equals the reference's, exactly; 0 otherwise.

    The number must stand alone behind the last `####`, in the last `\boxed{}`, or between the last answer tags. A
    response without such a mark earns nothing, so neither repeating the question nor listing candidates pays.

    Raises:
        ValueError: the reference answer is not a number.
    """
    reference = _reference(sample)
    wanted = parse_number(reference)
    if wanted is None:
        raise ValueError(f"reference answer {reference[:60]!r} is not a number; use the reward 'math' for expressions")
    given = final_answer(sample.response)
    return float(given is not None and parse_number(given) == wanted)


def choice(sample: RewardSample) -> float:
    r"""1 when the response's final letter is the reference's; marks as for `gsm8k`, `(B)` and `\text{B}` count as `B`.

    Raises:
        ValueError: the reference answer is not one letter.
    """
    reference = _reference(sample)
    wanted = _letter(reference)
    if wanted is None:
        raise ValueError(f"reference answer {reference[:60]!r} is not a single letter")
    given = final_answer(sample.response)
    return float(given is not None and _letter(given) == wanted)


def _reference(sample: RewardSample) -> str:
    """The final answer of the reference, which may be a worked solution."""
    if sample.answer is None:
        raise ValueError("the data row has no reference answer; set data.answer_field")
    marked = final_answer(sample.answer)
    return sample.answer.strip() if marked is None else marked


def _letter(text: str) -> str | None:
    match = _LETTER.fullmatch(text.strip())
    return match.group(1).upper() if match else None
