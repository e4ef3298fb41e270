"""Parses the final answer of a response, and plain numbers of an answer; strictly, so that nothing else is rewarded."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 64
"""Most characters of a number: longer ones are never answers, and parsing is quadratic."""
NO_ANSWER = "the data row has no reference answer; name the field that holds it (`--data.answer_field FIELD`)"
_ANNOUNCED = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*+(?:the )?(?:final |correct )?answer\s*+(?:is|:|=)\s*+:?\s*+(.+)", re.I
)
MARKS = ("####", r"\boxed", r"\fbox", "<answer>")

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|[+-]?\.[0-9]+")
_CURRENCY = re.compile(r"\\?\$\s?(?=[0-9.+-])")
_BARE_BOX = re.compile(r"\s++([+-]?[0-9][0-9,]*+(?:\.[0-9]++)?+|[A-Za-z])(?![\w.,/^({\\]*[\w/^({\\])")


def final_answer(text: str) -> str | None:
    r"""What stands behind the last `####` (to the end of its line), in the last `\boxed{}` or `\fbox{}`, or in the last
    `<answer>...</answer>`, whichever begins last; None without any of them. Marks in thoughts (`without_thoughts`)
    are none.

    A box without braces holds the number or the letter that follows (`\boxed 5`). A `\boxed{` that is never closed, or
    an `<answer>` cut off, is no answer, and hides the ones before it.
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
    """The text after the last `</think>`; if a thought is not closed, the text before it."""
    if "think>" not in text:
        return text
    _, ended, behind = text.rpartition("</think>")
    return (behind if ended else text).partition("<think>")[0]


def announced(text: str) -> str:
    """Returns `18` for `The answer is 18`; other texts unchanged."""
    match = _ANNOUNCED.fullmatch(text) if "nswer" in text else None
    return match.group(1) if match else text


def parse_number(text: str) -> Fraction | None:
    """The exact value of an integer or decimal in ASCII digits, or None for anything else.

    Commas must cut the integer part into threes (`1,234`, not `12,34`). A dollar sign in front and one full stop
    after are let pass. Operators, `=`, `%`, exponents, `nan`, `inf`, underscores and the digits of other alphabets
    are not numbers here; `rlsdk.rewards.quantity` reads more.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    bare = _CURRENCY.sub("", text.strip(), count=1) if "$" in text else text.strip()
    if bare.endswith(".") and not bare.endswith(".."):
        bare = bare[:-1]
    return Fraction(bare.replace(",", "")) if _NUMBER.fullmatch(bare) else None


def closing_brace(text: str) -> int:
    """Index of the brace that closes the one at the start of `text`; -1 if there is none. Escaped braces do not
    count."""
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
