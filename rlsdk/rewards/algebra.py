r"""Whether two expressions are equal by algebra: math-verify's verdict, on what passes a strict screen.

math-verify alone lets much through (against 42 it accepts `6*7`, `42%`, `41=42` and "42 or maybe not"), reads `BA` as a
product, and runs for minutes on `10^10^10`. So numbers, units, names, lists, tuples and words never reach it
(`rlsdk.rewards.symbolic` compares them), and any other expression must first be shown to be one finished expression of
bounded size. It is read by the LaTeX grammar only: math-verify's reader of plain expressions evaluates Python. What
still hangs is killed with the grading process and counted as a time-out.
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
"""Nested braces and brackets."""
MAX_POWER = 1_000
"""Product of all exponents: bounds the digits of whatever the expression evaluates to."""
MAX_DIGITS = 15
"""Digits of one integer."""

COMMANDS = frozenset({
    "alpha", "angle", "arccos", "arcsin", "arctan", "begin", "beta", "cap", "cdot", "circ", "cos", "cot", "csc", "cup",
    "degree", "delta", "div", "emptyset", "end", "exp", "frac", "gamma", "ge", "geq", "gt", "in", "infty", "lambda",
    "lceil", "le", "leq", "lfloor", "ln", "log", "lt", "lvert", "mathbb", "mathbf", "mathrm", "mp", "mu", "ne", "neq",
    "omega", "overline", "phi", "pi", "pm", "rceil", "rfloor", "rvert", "sec", "sigma", "sin", "sqrt", "tan", "text",
    "textbf", "theta", "times", "varnothing",
})  # fmt: skip
"""LaTeX commands that a candidate may hold besides those of its reference; none of them loops or grows."""
WORDS = frozenset({
    "arccos", "arcsin", "arctan", "array", "bmatrix", "cases", "cos", "exp", "inf", "log", "matrix", "pmatrix", "sin",
    "sqrt", "tan",
})  # fmt: skip
_CONNECTIVES = frozenset({"or", "and", "not", "is", "if", "no"})

_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_SUM_OF_NUMBERS = re.compile(r"(?<![\w.}^])[0-9.]+\s*(?:\*|\\times|\\cdot|\+|-)\s*[0-9.]+(?![\w.\\^{(])")
_EXPONENT = re.compile(r"\^\s*\{?\s*-?\s*([0-9]+)")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|[\w.]+|\\[a-z]+)\s*\^|\^\s*\{[^{}]*\^")


def import_math_verify() -> None:
    """Imports it and has it build its tables, which takes longer than grading a batch."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off, which is meant
    _parse("1")


def objection(given: str, wanted: str) -> str | None:
    """Why a `plain` candidate must not be handed to math-verify, or None when it may.

    Whatever the reference itself holds (an equals sign, a word, a sum) the candidate may hold too.
    """
    checks = (
        ("empty", not given),
        ("too long", len(given) > MAX_CHARS),
        ("nested too deeply", depth(given) > MAX_DEPTH),
        ("not ASCII", not given.isascii() and not set(given) <= set(wanted) | set(map(chr, range(128)))),
        ("holds a sign the reference lacks", any(c in given and c not in wanted for c in "=%!;:?&#@$\"'`\n")),
        ("subscript of a number", re.search(r"[0-9]_", given) is not None and re.search(r"[0-9]_", wanted) is None),
        ("approximate", "." in given and "." not in wanted),
        ("text", r"\text" in given and r"\text" not in wanted),
        ("words", bool(_strange_words(given, wanted))),
        ("commands", bool(_commands(given) - COMMANDS - _commands(wanted))),
        ("unfinished", _SUM_OF_NUMBERS.search(given) is not None and _SUM_OF_NUMBERS.search(wanted) is None),
        ("digits", any(len(run) > MAX_DIGITS and run not in wanted for run in re.findall(r"[0-9]+", given))),
        ("power", _power(given) > max(MAX_POWER, _power(wanted)) or _TOWER.search(given) is not None),
    )
    return next((reason for reason, found in checks if found), None)


@lru_cache(maxsize=8192)
def equal(wanted: str, given: str) -> bool:
    """math-verify's verdict, without its alarms: they fire as a plain "wrong". A hang is the grading process's
    business. Floats are compared to the last digit."""
    from math_verify import verify

    expected, found = _parse(wanted), _parse(given)
    if not expected or not found or _differ(expected, found):
        return False
    return bool(verify(expected, found, float_rounding=MAX_DIGITS, timeout_seconds=None))


def depth(text: str) -> int:
    """How deeply brackets are nested."""
    now = deepest = 0
    for char in text:
        now += (char in "{([") - (char in "})]")
        deepest = max(deepest, now)
    return deepest


def _differ(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """True when both are plain expressions with different values at one point, all variables positive: a hundredth of
    the cost of failing to prove them equal, and no chance to hang on it. The difference is relative, in arithmetic
    without an underflow: math-verify rounds `1/2^{99}` and `1/2^{98}` to the same zero."""
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
    """A value between 0.5 and 1.5 for each variable, by its name."""
    return {symbol: 0.5 + (0.618034 * sum(map(ord, symbol.name))) % 1 for symbol in symbols}


@lru_cache(maxsize=8192)
def _parse(text: str) -> list[Any]:
    """Kept, because the samples of one prompt share their reference, and often what they answer.

    As LaTeX only: math-verify's other way goes through sympy's `parse_expr`, which runs text as Python. Units stay: it
    would take the `m` of `5m` for one.
    """
    from math_verify import parse

    parsed: list[Any] = parse(f"${text}$", _latex(), fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


@cache
def _latex() -> Any:
    from math_verify import LatexExtractionConfig

    config = LatexExtractionConfig()
    return (replace(config, normalization_config=replace(config.normalization_config, units=False)),)


def _strange_words(given: str, wanted: str) -> set[str]:
    """Words that make a sentence of the candidate: three letters or more, or a short connective."""
    words = {word.lower() for word in _WORD.findall(given)}
    known = WORDS | {word.lower() for word in _WORD.findall(wanted)} | _commands(given)
    return {word for word in words if len(word) > 2 or word in _CONNECTIVES} - known


def _commands(text: str) -> set[str]:
    return set(re.findall(r"\\([a-zA-Z]+)", text))


def _power(text: str) -> int:
    """Product of all numeric exponents, each at least 1."""
    return prod(max(1, int(run[: MAX_DIGITS + 1])) for run in _EXPONENT.findall(text))
