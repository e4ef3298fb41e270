"""Grading of mathematical expressions: exact comparison first, math-verify only for what passes a strict screen.

math-verify alone lets much through (against 42 it accepts `6*7`, `42%`, `41=42` and "42 or maybe not") and runs for
minutes on `10^10^10`. So a numeric reference is compared as an exact number and never reaches it, and any other
candidate must first be shown to be one finished expression of bounded size. What still hangs is killed with the
grading process and counted as a time-out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, prod
from typing import Any

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.answer import final_answer, parse_number
from rlsdk.rewards.load import prepared_by

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

_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[!,;: ]|~|\^\s*\{?\s*\\circ\s*\}?")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_UNIT = re.compile(
    r"(?<=[0-9}])\s*\\(?:text|mathrm)\s*\{\s*(?:(?:square|cubic)\s+)?[a-zA-Z]{1,12}\.?\s*\}(?:\^\{?[23]\}?)?$"
)
_BLANK = re.compile(r"\s+(?=[^\w\s])|(?<=[^\w\s])\s+")
_ASSIGNED = re.compile(r"^[a-zA-Z]\s*=\s*(?=[^=]+$)")
_FRACTION = re.compile(r"([+-]?)(?:([0-9]+)/([0-9]+)|([0-9]+)?\\frac\{([0-9]+)\}\{([0-9]+)\})")
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_SUM_OF_NUMBERS = re.compile(r"(?<![\w.}^])[0-9.]+\s*(?:\*|\\times|\\cdot|\+|-)\s*[0-9.]+(?![\w.\\^{(])")
_EXPONENT = re.compile(r"\^\s*\{?\s*-?\s*([0-9]+)")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|[\w.]+|\\[a-z]+)\s*\^|\^\s*\{[^{}]*\^")


def _import_math_verify() -> None:
    """Imports it and has it build its tables, which takes longer than grading a batch."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off, which is meant
    parse("$1$", parsing_timeout=None)


@prepared_by(_import_math_verify)
def math(sample: RewardSample) -> float:
    r"""1 when the response's final expression equals the reference; 0 otherwise.

    The final expression stands behind the last `####`, in the last `\boxed{}` or between answer tags; a response of
    one short line without any mark is taken whole. Numbers are compared exactly (0.333333 is not 1/3) and must be
    finished (`6*7` and `84/2` are not 42). Any other expression may be written in another form, but not by repeating
    a piece of the prompt.

    Raises:
        ValueError: the data row has no reference answer.
    """
    if not sample.answer:
        raise ValueError("the data row has no reference answer; set data.answer_field")
    wanted = normalise(final_answer(sample.answer) or sample.answer)
    given = _candidate(sample.response)
    if given is None:
        return 0.0
    given = normalise(given)
    if given == wanted:
        return float(bool(given))
    exact = parse_rational(wanted)
    if exact is not None:
        return float(parse_rational(given) == exact)
    if objection(given, wanted, sample.prompt) is not None:
        return 0.0
    return float(_equal(wanted, given))


def normalise(text: str) -> str:
    """One spelling of an expression: without dollar signs, spacing commands, sizes, degree signs, units and blanks
    that mean nothing. A blank between two letters or digits stays: `4 2` is not `42`."""
    text = text.strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text.removesuffix("."))
    text = _DROPPED.sub("", text).replace(r"\%", "%").replace(r"\$", "").replace("**", "^").replace("{,}", ",")
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    whole = re.fullmatch(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", text.strip())
    text = whole.group(1) if whole else _UNIT.sub("", text.strip())
    return _BLANK.sub("", _ASSIGNED.sub("", " ".join(text.split())))


def parse_rational(text: str) -> Fraction | None:
    """The exact value of a number, or of a fraction in lowest terms (`2/3`, `\\frac{2}{3}`, `1\\frac{2}{3}`); None for
    anything else, unfinished fractions like `84/2` included."""
    number = parse_number(text)
    if number is not None or len(text) > 2 * MAX_DIGITS + 16:
        return number
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom, whole, upper, lower = match.groups()
    numerator, denominator = int(top or upper), int(bottom or lower)
    if denominator < 2 or gcd(numerator, denominator) != 1 or (whole and numerator > denominator):
        return None
    value = int(whole or 0) + Fraction(numerator, denominator)
    return -value if sign == "-" else value


def objection(given: str, wanted: str, prompt: str) -> str | None:
    """Why a normalised candidate must not be handed to math-verify, or None when it may.

    Whatever the reference itself holds (an equals sign, a word, a sum) the candidate may hold too.
    """
    checks = (
        ("empty", not given),
        ("too long", len(given) > MAX_CHARS),
        ("nested too deeply", _depth(given) > MAX_DEPTH),
        ("not ASCII", not given.isascii() and not set(given) <= set(wanted) | set(map(chr, range(128)))),
        ("holds a sign the reference lacks", any(c in given and c not in wanted for c in "=%!;:?&#@\"'`\n")),
        ("digit separator", re.search(r"[0-9]_[0-9]", given) is not None),
        ("approximate", "." in given and "." not in wanted),
        ("words", bool(_strange_words(given, wanted))),
        ("commands", bool(_commands(given) - COMMANDS - _commands(wanted))),
        ("unfinished", _SUM_OF_NUMBERS.search(given) is not None and _SUM_OF_NUMBERS.search(wanted) is None),
        ("digits", any(len(run) > MAX_DIGITS and run not in wanted for run in re.findall(r"[0-9]+", given))),
        ("power", _power(given) > max(MAX_POWER, _power(wanted)) or _TOWER.search(given) is not None),
        ("copied from the prompt", len(given) > 2 and _squeezed(given) in _squeezed(prompt)),
    )
    return next((reason for reason, found in checks if found), None)


def _candidate(response: str) -> str | None:
    """The marked answer, or the whole of a response that is one short line."""
    marked = final_answer(response)
    if marked is not None:
        return marked
    unmarked = not any(mark in response for mark in ("####", r"\boxed", "<answer>"))
    bare = response.strip()
    return bare if unmarked and bare and "\n" not in bare and len(bare) <= MAX_CHARS else None


@lru_cache(maxsize=8192)
def _equal(wanted: str, given: str) -> bool:
    """math-verify's verdict, without its alarms: they fire as a plain "wrong". A hang is the grading process's
    business. Floats are compared to the last digit."""
    from math_verify import verify

    expected, found = _parse(wanted), _parse(given)
    if not expected or not found or _differ(expected, found):
        return False
    return bool(verify(expected, found, float_rounding=MAX_DIGITS, timeout_seconds=None))


def _differ(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """True when both are plain expressions with different values at one point, all variables positive: a hundredth of
    the cost of failing to prove them equal, and no chance to hang on it."""
    from sympy import Expr

    pair = [*expected, *found]
    if len(pair) != 2 or not all(isinstance(value, Expr) for value in pair):
        return False
    try:
        left, right = (complex(value.evalf(30, subs=_point(value.free_symbols))) for value in pair)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False
    return abs(left - right) > 1e-9 * max(1.0, abs(left), abs(right))


def _point(symbols: Iterable[Any]) -> dict[Any, float]:
    """A value between 0.5 and 1.5 for each variable, by its name."""
    return {symbol: 0.5 + (0.618034 * sum(map(ord, symbol.name))) % 1 for symbol in symbols}


@lru_cache(maxsize=8192)
def _parse(text: str) -> list[Any]:
    """Kept, because the samples of one prompt share their reference, and often what they answer.

    As LaTeX only: math-verify's other way goes through sympy's `parse_expr`, which runs text as Python.
    """
    from math_verify import LatexExtractionConfig, parse

    latex = [LatexExtractionConfig()]
    parsed: list[Any] = parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    return deepest


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


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
