"""Graders of word problems and multiple choice: exact, and cheap enough to run on every sample."""

from __future__ import annotations

import re
from functools import lru_cache

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.functions.load import checks_rows
from rlsdk.rewards.math.normalization import plain, unwrap
from rlsdk.rewards.math.quantity import Quantity, parse_quantity
from rlsdk.rewards.math.structure import split_name
from rlsdk.rewards.text.answer import announced, final_answer, has_mark, no_answer, parse_number, without_thoughts

MAX_CHARS = 256
"""Maximum length of an answer in characters; longer texts are sentences around an answer."""

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WITH_OPTION = re.compile(r"\(?([A-Z])\s*[).:]\s*((?!(?:is|was|or|and|not|but|because|isn't|seems)\b)\S.*)")
_OTHER_LETTER = re.compile(r"(?<![A-Za-z\\'])[A-H](?![A-Za-z'])")
_ANNOUNCED = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*+(?:the )?(?:final |correct |right )?"
    r"(?:(?:answer|choice|option)\s*+(?:(?:is|:|=)\s*+:?|(?=\())\s*+(?:option |choice )?|(?:option|choice) (?=[A-Z]\b))"
    r"(.+)",
    re.IGNORECASE,
)


@checks_rows
def gsm8k(sample: RewardSample) -> float:
    r"""Returns 1 if the response's final number equals the reference's exactly, else 0.

    The number must stand alone after the last `####`, in the last `\boxed{}`, or between the last answer tags. A unit,
    bold type, a currency sign or a name (`x = 18`) is allowed. A response without such a mark scores 0, so it does not
    pay to repeat the question or to list candidates. docs/graders.md has the rules for numbers and units.

    Raises:
        ValueError: the reference answer is not a number.
    """
    wanted = _reference_number(_reference(sample))
    given = final_answer(sample.response)
    if given is None or len(given) > MAX_CHARS:
        return 0.0
    given = announced(given)
    number = parse_number(given)
    found = _quantity(given) if number is None or "$" in given else Quantity(value=number)
    return float(found is not None and wanted.same(found))


@checks_rows
def choice(sample: RewardSample) -> float:
    r"""Returns 1 if the response's final letter is the reference's, else 0.

    The letter follows a mark as for `gsm8k`, is in a last line such as "Answer: B", or is the whole response. Brackets,
    bold type, a full stop and the option's text (`B. Paris`) are allowed; a second letter is not.

    Raises:
        ValueError: the reference answer is not one letter.
    """
    reference = _reference(sample)
    wanted = _letter(reference)
    if wanted is None:
        raise ValueError(f"reference answer {reference[:60]!r} is not a single letter")
    return float(_letter(_chosen(sample.response)) == wanted)


def _reference(sample: RewardSample) -> str:
    """Returns the final answer of the reference, which may be a worked solution."""
    if sample.answer is None:
        raise ValueError(no_answer())
    marked = final_answer(sample.answer)
    return sample.answer.strip() if marked is None else marked


@lru_cache(maxsize=8192)
def _reference_number(reference: str) -> Quantity:
    wanted = _quantity(reference)
    if wanted is None:
        raise ValueError(f"reference answer {reference[:60]!r} is not a number; use the reward 'math' for expressions")
    return wanted


def _quantity(text: str) -> Quantity | None:
    return parse_quantity(unwrap(split_name(plain(text))[1]))


def _chosen(response: str) -> str:
    """Returns the text that should contain the letter: the marked text, a last line such as "Answer: B", or the only
    line."""
    if has_mark(response):
        return final_answer(response) or ""
    lines = without_thoughts(response).strip().splitlines()
    last = lines[-1] if lines else ""
    return last if len(lines) == 1 or _ANNOUNCED.fullmatch(plain(last)) else ""


def _letter(text: str) -> str | None:
    if not text or len(text) > MAX_CHARS:
        return None
    text = unwrap(_TEXT.sub(r"\1 ", plain(text)))
    said = _ANNOUNCED.fullmatch(text)
    text = unwrap(said.group(1)) if said else text
    alone = _LETTER.fullmatch(text)
    if alone:
        return alone.group(1).upper()
    option = _WITH_OPTION.fullmatch(text)
    return option.group(1) if option and not _OTHER_LETTER.search(option.group(2)) else None
