"""Reading the final answer out of a response, and numbers out of an answer: strictly, so that nothing else earns."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 64
"""Longer digit strings are no answer to anything, and would be parsed at quadratic cost."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|[+-]?\.[0-9]+")
_CURRENCY = re.compile(r"\\?\$\s?(?=[0-9.+-])")


def final_answer(text: str) -> str | None:
    r"""What stands behind the last `####` (to the end of its line), in the last `\boxed{}`, or in the last
    `<answer>...</answer>`, whichever begins last; None without any of them.

    A `\boxed{` that is never closed, or an `<answer>` cut off, is no answer, and hides the ones before it.
    """
    marks = (("####", _line), (r"\boxed", _braces), ("<answer>", _tag))
    at, mark, read = max((text.rfind(mark), mark, read) for mark, read in marks)
    return None if at < 0 else read(text[at + len(mark) :])


def parse_number(text: str) -> Fraction | None:
    """The exact value of an integer or decimal in ASCII digits, or None for anything else.

    Commas must cut the integer part into threes (`1,234`, not `12,34`). A dollar sign in front and one full stop
    behind are let pass. Operators, `=`, `%`, exponents, `nan`, `inf`, underscores and the digits of other alphabets
    are not numbers here.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    bare = _CURRENCY.sub("", text.strip(), count=1) if "$" in text else text.strip()
    if bare.endswith(".") and not bare.endswith(".."):
        bare = bare[:-1]
    return Fraction(bare.replace(",", "")) if _NUMBER.fullmatch(bare) else None


def _line(rest: str) -> str:
    return rest.split("\n", 1)[0].strip()


def _braces(rest: str) -> str | None:
    """The inside of the braces that `rest` begins with."""
    rest = rest.lstrip()
    if not rest.startswith("{"):
        return None
    depth = 0
    for at, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:at].strip()
    return None


def _tag(rest: str) -> str | None:
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if closed else None
