r"""Compares two expressions by algebra with math-verify, after strict checks.

math-verify alone is too lenient (against 42 it accepts `6*7`, `42%`, `41=42` and "42 or maybe not"), reads `BA` as a
product, and runs for minutes on `10^10^10`. So it never sees numbers, units, names, lists, tuples and words
(`rlsdk.rewards.math.symbolic` compares them). Any other expression must first pass checks that it is one evaluated
expression of bounded size. Only the LaTeX parser is used, because math-verify's parser of plain expressions evaluates
Python. If an expression still hangs, the grading process is killed and the sample counts as a time-out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from typing import Any

MAX_CHARS = 256
MAX_DEPTH = 12
"""Maximum nesting of braces and brackets."""
MAX_POWER = 1_000
"""Maximum product of all exponents; it bounds the number of digits of the result."""
MAX_DIGITS = 15
"""Maximum number of digits of one integer."""

COMMANDS = frozenset({
    "alpha", "angle", "arccos", "arcsin", "arctan", "begin", "beta", "cap", "cdot", "circ", "cos", "cot", "csc", "cup",
    "degree", "delta", "div", "emptyset", "end", "exp", "frac", "gamma", "ge", "geq", "gt", "in", "infty", "lambda",
    "lceil", "le", "leq", "lfloor", "ln", "log", "lt", "lvert", "mathbb", "mathbf", "mathrm", "mp", "mu", "ne", "neq",
    "omega", "overline", "phi", "pi", "pm", "rceil", "rfloor", "rvert", "sec", "sigma", "sin", "sqrt", "tan", "text",
    "textbf", "theta", "times", "varnothing",
})  # fmt: skip
"""LaTeX commands that are allowed besides those of the reference. None of them makes the evaluation long or large."""
WORDS = frozenset({
    "arccos", "arcsin", "arctan", "array", "bmatrix", "cases", "cos", "exp", "inf", "log", "matrix", "pmatrix", "sin",
    "sqrt", "tan",
})  # fmt: skip
_CONNECTIVES = frozenset({"or", "and", "not", "is", "if", "no"})

_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_SUM_OF_NUMBERS = re.compile(r"(?<![\w.}^])[0-9.]+\s*(?:\*|\\times|\\cdot|\+|-)\s*[0-9.]+(?![\w.\\^{(])")
_EXPONENT = re.compile(r"\^\s*\{?\s*-?\s*([0-9]+)")
_HUGE = re.compile(r"[0-9.]\s*[eE]\s*\{?\s*[+-]?\s*[0-9]{4}")
"""A large power of ten in scientific notation (`1E999999999`), which sympy expands to all its digits."""
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|[\w.]+|\\[a-z]+)\s*\^|\^\s*\{[^{}]*\^")


def import_math_verify() -> None:
    """Imports math-verify and makes it build its tables, which takes longer than grading a batch."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its time-outs are off (on purpose)
    _parse("1")


def objection(given: str, wanted: str) -> str | None:
    """Returns why a candidate normalized by `plain` must not be passed to math-verify; None if it may.

    The candidate may contain whatever the reference contains (an equals sign, a word, a sum).
    """
    checks = (
        ("empty", not given),
        ("too long", len(given) > MAX_CHARS),
        ("nested too deeply", depth(given) > MAX_DEPTH),
        ("not ASCII", not given.isascii() and not set(given) <= set(wanted) | set(map(chr, range(128)))),
        ("contains a sign that the reference lacks", any(c in given and c not in wanted for c in "=%!;:?&#@$\"'`\n")),
        ("subscript of a number", re.search(r"[0-9]_", given) is not None and re.search(r"[0-9]_", wanted) is None),
        ("approximate", "." in given and "." not in wanted),
        ("text", r"\text" in given and r"\text" not in wanted),
        ("words", bool(_prose_words(given, wanted))),
        ("commands", bool(_commands(given) - COMMANDS - _commands(wanted))),
        ("unfinished", _SUM_OF_NUMBERS.search(given) is not None and _SUM_OF_NUMBERS.search(wanted) is None),
        ("digits", any(len(run) > MAX_DIGITS and run not in wanted for run in re.findall(r"[0-9]+", given))),
        ("power", _power(given) > max(MAX_POWER, _power(wanted)) or _TOWER.search(given) is not None),
        ("power of ten", _HUGE.search(given) is not None and _HUGE.search(wanted) is None),
    )
    return next((reason for reason, applies in checks if applies), None)


@lru_cache(maxsize=8192)
def equal(wanted: str, given: str) -> bool:
    """Whether math-verify finds the two equal. Floats are compared to 15 digits.

    Its own time-outs are off, because they report a slow comparison as a wrong answer; the time limit of the grading
    process stops a hang.
    """
    from math_verify import verify

    expected, found = _parse(wanted), _parse(given)
    if not expected or not found or _is_infinite(expected) != _is_infinite(found) or _differ(expected, found):
        return False
    return bool(verify(expected, found, float_rounding=MAX_DIGITS, timeout_seconds=None))


def depth(text: str) -> int:
    """Returns the maximum nesting of brackets."""
    now = deepest = 0
    for char in text:
        now += (char in "{([") - (char in "})]")
        deepest = max(deepest, now)
    return deepest


def _is_infinite(values: Iterable[Any]) -> bool:
    r"""Whether a value, or a part of it, is infinite or undefined at one point; intervals and other sets are not looked
    at. math-verify finds `|\ln 0|` equal to every irrational number."""
    from sympy import FiniteSet, Set, nan, oo, zoo
    from sympy.core.relational import Relational

    for value in values:
        if isinstance(value, Set) and not isinstance(value, FiniteSet):
            continue
        if isinstance(value, Relational):
            if _is_infinite(value.args):
                return True
            continue
        try:
            if value.evalf(30, subs=_point(value.free_symbols)).has(oo, -oo, zoo, nan):
                return True
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            continue
    return False


def _differ(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether both are plain expressions with different values at one point, where all variables are positive.

    This takes a hundredth of the time of a failed proof of equality, and cannot hang in one. The relative difference
    counts, in arithmetic without underflow: math-verify rounds both `1/2^{99}` and `1/2^{98}` to zero.
    """
    from sympy import Expr, Max

    pair = [*expected, *found]
    if len(pair) != 2 or not all(isinstance(value, Expr) for value in pair):
        return False
    try:
        left, right = (value.evalf(30, subs=_point(value.free_symbols)) for value in pair)
        size = Max(abs(left), abs(right))
        return bool(abs(left - right) > size * 1e-9)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False


def _point(symbols: Iterable[Any]) -> dict[Any, float]:
    """Returns a value between 0.5 and 1.5 for each variable, derived from its name."""
    return {symbol: 0.5 + (0.618034 * sum(map(ord, symbol.name))) % 1 for symbol in symbols}


@lru_cache(maxsize=8192)
def _parse(text: str) -> list[Any]:
    """Parses LaTeX with math-verify. Cached, because samples of one prompt share the reference and often the answer.

    LaTeX only: math-verify's other parser uses sympy's `parse_expr`, which runs text as Python. Removal of units is
    off: it would treat the variable `m` in `5m` as a unit.
    """
    from math_verify import parse

    parsed: list[Any] = parse(f"${text}$", _latex(), fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


@cache
def _latex() -> Any:
    from math_verify import LatexExtractionConfig

    config = LatexExtractionConfig()
    return (replace(config, normalization_config=replace(config.normalization_config, units=False)),)


def _prose_words(given: str, wanted: str) -> set[str]:
    """Returns words that suggest prose instead of mathematics: three letters or more, or a short connective."""
    words = {word.lower() for word in _WORD.findall(given)}
    known = WORDS | {word.lower() for word in _WORD.findall(wanted)} | _commands(given)
    return {word for word in words if len(word) > 2 or word in _CONNECTIVES} - known


def _commands(text: str) -> set[str]:
    return set(re.findall(r"\\([a-zA-Z]+)", text))


def _power(text: str) -> int:
    """Returns the product of all numeric exponents, each counted as at least 1."""
    return prod(max(1, int(run[: MAX_DIGITS + 1])) for run in _EXPONENT.findall(text))
