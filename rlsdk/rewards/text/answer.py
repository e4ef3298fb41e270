"""Parses the final answer of a response, and plain numbers in an answer; strictly, so that nothing else scores."""

from __future__ import annotations

import re
from fractions import Fraction

from rlsdk.interfaces.spelling import Setting

MAX_NUMBER_CHARS = 64
"""Maximum length of a number in characters: longer ones are never answers, and parsing is quadratic."""
_ANNOUNCED = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*+(?:the )?(?:final |correct )?answer\s*+(?:is|:|=)\s*+:?\s*+(.+)", re.I
)
MARKS = ("####", r"\boxed", r"\fbox", "<answer>")

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|[+-]?\.[0-9]+")
_CURRENCY = re.compile(r"\\?\$\s?(?=[0-9.+-])")
_BARE_BOX = re.compile(r"\s++([+-]?[0-9][0-9,]*+(?:\.[0-9]++)?+|[A-Za-z])(?![\w.,/^({\\]*[\w/^({\\])")


def no_answer() -> str:
    """Why a row without a reference answer has no score."""
    named = Setting("data.answer_field", "FIELD")
    return f"the data row has no reference answer; name the field that holds it (`{named}`)"


def final_answer(text: str) -> str | None:
    r"""Returns the text after the last mark of a final answer; None if there is no mark.

    Marks are `####` (the answer is the rest of the line), `\boxed{}` or `\fbox{}`, and `<answer>...</answer>`. The one
    that begins last counts. Marks in thoughts are ignored (`without_thoughts`).

    The answer of a box without braces is the number or the letter that follows (`\boxed 5`). A `\boxed{` or `<answer>`
    that is not closed gives None, even if there is a complete mark before it.
    """
    text = without_thoughts(text)
    at, mark = max((text.rfind(mark), mark) for mark in MARKS)
    if at < 0:
        return None
    rest = text[at + len(mark) :]
    if mark == "####":
        return rest.split("\n", 1)[0].strip()
    return _tag(rest) if mark == "<answer>" else _box(rest)


def has_mark(text: str) -> bool:
    """Whether the text contains a mark of a final answer, complete or not."""
    text = without_thoughts(text)
    return any(mark in text for mark in MARKS)


def without_thoughts(text: str) -> str:
    """Returns the text after the last `</think>` if there is one, and before a `<think>` that is not closed."""
    if "think>" not in text:
        return text
    _, ended, behind = text.rpartition("</think>")
    return (behind if ended else text).partition("<think>")[0]


def announced(text: str) -> str:
    """Returns `18` for `The answer is 18`; returns other texts unchanged."""
    match = _ANNOUNCED.fullmatch(text) if "nswer" in text else None
    return match.group(1) if match else text


def parse_number(text: str) -> Fraction | None:
    """Returns the exact value of an integer or decimal in ASCII digits; None for anything else.

    Commas must separate groups of three digits (`1,234`, not `12,34`). A dollar sign before the number and one full
    stop after it are ignored. Operators, `=`, `%`, exponents, `nan`, `inf`, underscores and the digits of other
    alphabets are not allowed here; `rlsdk.rewards.math.quantity` accepts more forms.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    bare = _CURRENCY.sub("", text.strip(), count=1) if "$" in text else text.strip()
    if bare.endswith(".") and not bare.endswith(".."):
        bare = bare[:-1]
    return Fraction(bare.replace(",", "")) if _NUMBER.fullmatch(bare) else None


def closing_brace(text: str) -> int:
    """Returns the index of the brace that closes the one at the start of `text`; -1 if there is none.

    Escaped braces do not count.
    """
    depth = 0
    escaped = False
    for at, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return at
    return -1


def _box(rest: str) -> str | None:
    inside = rest.lstrip()
    if not inside.startswith("{"):
        bare = _BARE_BOX.match(rest)
        return bare.group(1) if bare else None
    end = closing_brace(inside)
    return inside[1:end].strip() if end > 0 else None


def _tag(rest: str) -> str | None:
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if closed else None
