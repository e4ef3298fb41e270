"""Replacements for the scorers of reasoning-gym that run text as Python: by `eval`, or by sympy's `parse_expr`.

Nine scorers of the library evaluate model output, two evaluate the data row. Each replacement gives the library's
score, partial credit included, to text that its grammar accepts, and 0 to anything else. `evaluates_text` finds
scorers of this kind in the installed version, so that a new one is refused instead of run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from rlsdk_reasoning_gym.expressions import (
    GrammarError,
    Literal,
    parse_algebra,
    parse_arithmetic,
    parse_literal,
    polynomial_of,
    value_of,
    whole_numbers,
)
from rlsdk_reasoning_gym.integrals import is_antiderivative

Row: TypeAlias = Mapping[str, Any]
Scorer: TypeAlias = Callable[[str, dict[str, Any]], float]


def countdown(given: str, row: Row) -> float:
    """Returns 1 for an expression that uses exactly the given numbers and equals the target."""
    return _equation(given, row, row["metadata"]["target"], otherwise=(0.01, 0.05))


def puzzle24(given: str, row: Row) -> float:
    """Returns 1 for an expression that uses exactly the given numbers and equals 24.

    The library's scorer also accepts 24.9, and any four numbers.
    """
    return _equation(given, row, 24, otherwise=(0.01, 0.01))


def string_insertion(given: str, row: Row) -> float:
    """Returns 1 for the reference, 0.1 for the correct letters as a list, else 0."""
    return _as_list(given, row["answer"], 0.1, lambda value: "".join(map(_text, _items(value))))


def spiral_matrix(given: str, row: Row) -> float:
    """Returns 1 for the reference, 0.1 for the correct numbers as a list, else 0."""
    return _as_list(given.strip(), row["answer"].strip(), 0.1, lambda value: " ".join(map(str, _items(value))))


def binary_matrix(given: str, row: Row) -> float:
    """Returns 1 for the reference, 0.1 for the correct matrix as lists, else 0."""
    return _as_list(given, row["answer"], 0.1, _matrix)


def n_queens(given: str, row: Row) -> float:
    """Returns 1 for a valid board, 0.5 for a valid board as lists, else 0."""
    boards = row["metadata"]["valid_answers"]
    return 1.0 if given in boards else 0.5 if _read(given, _matrix) in boards else 0.0


def integration(given: str, row: Row) -> float:
    """Returns 1 for an antiderivative of the integrand, and for the reference itself.

    A reference holds an `Integral` if sympy cannot integrate the function. The library accepts an `Integral` as an
    answer to every question; this scorer accepts it only where the reference has it.
    """
    if given.strip() == row["answer"].strip():
        return 1.0
    metadata = row["metadata"]
    try:
        return float(is_antiderivative(given, metadata["integrand"], metadata["variable"]))
    except GrammarError:
        return 0.0


def polynomial_multiplication(given: str, row: Row) -> float:
    """Returns 1 for the expanded product, its terms in any order."""
    wanted = polynomial_of(parse_algebra(row["answer"]))
    try:
        return float(polynomial_of(parse_algebra(given)) == wanted)
    except (GrammarError, ZeroDivisionError):
        return 0.0


def bitwise_arithmetic(given: str, row: Row) -> float:
    """Returns 1 for the correct number in any base of Python's notation. The library evaluates the row's problem."""
    return float(int(given, 0) == int(row["answer"], 0))


SCORERS: Mapping[str, Callable[[str, Row], float]] = {
    "countdown": countdown,
    "puzzle24": puzzle24,
    "string_insertion": string_insertion,
    "spiral_matrix": spiral_matrix,
    "binary_matrix": binary_matrix,
    "n_queens": n_queens,
    "simple_integration": integration,
    "intermediate_integration": integration,
    "polynomial_multiplication": polynomial_multiplication,
    "bitwise_arithmetic": bitwise_arithmetic,
}
"""Task -> the scorer that replaces the library's."""


def plain_list(row: Row) -> dict[str, Any]:
    """Returns the row with its answer as JSON; the scorer of number_sorting evaluates an answer that is not JSON."""
    return {**row, "answer": json.dumps(parse_literal(row["answer"]))}


SAFE_ROWS: Mapping[str, Callable[[Row], dict[str, Any]]] = {"number_sorting": plain_list}
"""Task -> a conversion of its row, after which the library's scorer does not evaluate text."""


def _equation(given: str, row: Row, target: int, *, otherwise: tuple[float, float]) -> float:
    """Returns 1 if correct; else `otherwise[0]` if the text cannot be parsed, `otherwise[1]` if it is wrong."""
    try:
        tree = parse_arithmetic(given)
        used, value = whole_numbers(tree), value_of(tree)
    except (GrammarError, ZeroDivisionError):
        return otherwise[0]
    correct = sorted(used) == sorted(row["metadata"]["numbers"]) and value == Fraction(target)
    return 1.0 if correct else otherwise[1]


def _as_list(given: str, wanted: str, credit: float, join: Callable[[Literal], str]) -> float:
    return 1.0 if given == wanted else credit if _read(given, join) == wanted else 0.0


def _read(given: str, join: Callable[[Literal], str]) -> str | None:
    try:
        return join(parse_literal(given))
    except (GrammarError, TypeError):
        return None


def _matrix(value: Literal) -> str:
    return "\n".join(" ".join(map(str, _items(line))) for line in _items(value))


def _items(value: Literal) -> list[Any]:
    if isinstance(value, int | float):
        raise GrammarError("expected a list, found a number")
    return list(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise GrammarError("not text")
    return value
