r"""Splits an answer into parts: a list of solutions, a set, a tuple, an interval, or a single value.

Each part may have a name (`x = 5`). In lists (`1, 2`, `x = 1 or x = 2`, `1 \pm \sqrt{2}`) and sets (`\{1, 2\}`) the
order of the parts does not matter; in tuples and intervals order and brackets matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlsdk.rewards.math.normalization import top_level, unwrap

MAX_PARTS = 32

_LETTER = r"(?:[a-zA-Z]|\\[a-z]{2,8})(?:_(?:\{\w{1,8}\}|\w))?'?"
_NAME = re.compile(
    rf"((?:{_LETTER}|\|?[A-Z]{{2,4}}\|?|\\angle ?[A-Z]{{1,3}})(?:\({_LETTER}(?:,{_LETTER})*\))?"
    rf"|\({_LETTER}(?:,{_LETTER})+\))(?:=|\\in(?![a-z]))(?=[^=<>]+$)"
)
_RELATION = re.compile(r"[=<>]|\\(?:le|leq|ge|geq|lt|gt|ne|neq|in|approx|equiv|cong)(?![a-z])")
_CONSTANTS = ("\\pi", "\\infty")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of an answer, and its name."""

    text: str
    name: str | None = None

    @property
    def whole(self) -> str:
        return f"{self.name}={self.text}" if self.name else self.text


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer normalized by `plain`, split into parts."""

    brackets: str
    r"""`()`, `[]`, `[)` or `(]` for a tuple or interval; `{}` for a set; empty for a list or a single value."""
    name: str | None
    """Name of the whole answer: `(x,y)` in `(x,y) = (1,2)`."""
    parts: tuple[Part, ...]

    @property
    def in_order(self) -> bool:
        return self.brackets not in ("", "{}")

    @property
    def names(self) -> set[str]:
        return {part.name for part in self.parts if part.name}


def read(text: str) -> Answer | None:
    """Splits an answer normalized by `plain`; None if a part is empty or there are too many parts."""
    name, body = split_name(text)
    brackets, inner = _brackets(body)
    if not brackets:
        name, inner = None, text
    parts = [part.strip() for part in top_level(inner, ",;")] if inner else []
    parts = [sign for part in parts for sign in _both_signs(part)]
    if len(parts) > MAX_PARTS or any(not part for part in parts):
        return None
    if brackets == "()" and len(parts) == 1:
        return None
    named = [split_name(unwrap(part)) for part in parts]
    return Answer(brackets=brackets, name=name, parts=tuple(Part(name=n, text=unwrap(t)) for n, t in named))


def split_name(text: str) -> tuple[str | None, str]:
    r"""Splits off the name: `x=5` gives `x` and `5`, `f(x)=x^2` gives `f(x)` and `x^2`, `x\in[0,1]` `x` and `[0,1]`.

    The name is None if there are two equals signs, or a number on the left side.
    """
    match = _NAME.match(text)
    if match is None or match.group(1) in _CONSTANTS:
        return None, text
    return match.group(1), text[match.end() :].strip()


def is_relation(text: str) -> bool:
    """Whether the text contains a relation sign, such as equality, inequality or membership."""
    return _RELATION.search(text) is not None


def _brackets(text: str) -> tuple[str, str]:
    """Returns the outer brackets and their content, if the content is a list or the brackets are those of a set.

    Otherwise returns no brackets and the whole text.
    """
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner, kind = text[2:-2], "{}"
    elif len(text) > 1 and text[0] in "([{" and text[-1] in ")]}":
        inner, kind = text[1:-1], text[0] + text[-1]
    else:
        return "", text
    several = len(top_level(inner, ",;")) > 1
    closed_early = _closes_early(inner)
    if closed_early or (not several and kind != "{}") or (kind not in ("{}", "()", "[]", "[)", "(]")):
        return "", text
    return kind, inner


def _closes_early(inner: str) -> bool:
    r"""Whether the first bracket closes before the end, as in `(1,2),(3,4)` or `[0,1)\cup(2,3]`."""
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return True
    return False


def _both_signs(part: str) -> list[str]:
    r"""Expands `1\pm\sqrt{2}` to `1+\sqrt{2}` and `1-\sqrt{2}`."""
    signs = len(re.findall(r"\\pm(?![a-z])", part))
    if signs != 1 or r"\mp" in part:
        return [part]
    before, after = (side.strip() for side in re.split(r"\\pm(?![a-z])", part))
    plus = "" if not before or before[-1] in "=({[" else "+"
    return [f"{before}{plus}{after}", f"{before}-{after}"]
