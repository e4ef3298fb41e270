"""Scorers in place of those of reasoning-gym that run text as Python: `eval`, or sympy's `parse_expr`, which is `eval`.

Nine of them evaluate what the model wrote, two what stands in the data row. Each one here gives what the library's
gives (partial credit too) to what its grammar accepts, and nothing to anything else. Scorers of this kind in
whatever version is installed are found by `evaluates_text`, so that a new one is refused and not run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from rlsdk.rewards.expressions import (
    GrammarError,
    Literal,
    parse_algebra,
    parse_arithmetic,
    parse_literal,
    polynomial_of,
    value_of,
    whole_numbers,
)
from rlsdk.rewards.integrals import is_antiderivative

Row: TypeAlias = Mapping[str, Any]
Scorer: TypeAlias = Callable[[str, dict[str, Any]], float]


def countdown(given: str, row: Row) -> float:
    """1 for an expression of exactly the given numbers whose value is the target."""
    return _equation(given, row, row["metadata"]["target"], otherwise=(0.01, 0.05))


def puzzle24(given: str, row: Row) -> float:
    """1 for an expression of exactly the given numbers whose value is 24. The library's also takes 24.9, and any four
    numbers."""
    return _equation(given, row, 24, otherwise=(0.01, 0.01))


def string_insertion(given: str, row: Row) -> float:
    """0.1 where the letters are correct but given as a list."""
    return _as_list(given, row["answer"], 0.1, lambda value: "".join(map(_text, _items(value))))


def spiral_matrix(given: str, row: Row) -> float:
    """0.1 where the numbers are correct but given as a list."""
    return _as_list(given.strip(), row["answer"].strip(), 0.1, lambda value: " ".join(map(str, _items(value))))


def binary_matrix(given: str, row: Row) -> float:
    """0.1 where the matrix is correct but given as lists."""
    return _as_list(given, row["answer"], 0.1, _matrix)


def n_queens(given: str, row: Row) -> float:
    """1 for any valid board, 0.5 where it is given as lists."""
    boards = row["metadata"]["valid_answers"]
    return 1.0 if given in boards else 0.5 if _read(given, _matrix) in boards else 0.0


def integration(given: str, row: Row) -> float:
    """1 for any antiderivative of the integrand, and for the reference, which holds what sympy cannot integrate as an
    `Integral`: to the library that is an answer to every question, here it is not."""
    if given.strip() == row["answer"].strip():
        return 1.0
    metadata = row["metadata"]
    try:
        return float(is_antiderivative(given, metadata["integrand"], metadata["variable"]))
    except GrammarError:
        return 0.0


def polynomial_multiplication(given: str, row: Row) -> float:
    """1 for the terms of the product, written out, in any order."""
    wanted = polynomial_of(parse_algebra(row["answer"]))
    try:
        return float(polynomial_of(parse_algebra(given)) == wanted)
    except (GrammarError, ZeroDivisionError):
        return 0.0


def bitwise_arithmetic(given: str, row: Row) -> float:
    """1 for the number in any base that Python writes. The library's evaluates the row's problem."""
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
"""Task -> what scores it instead of the library's own function."""


def plain_list(row: Row) -> dict[str, Any]:
    """The row with its answer as JSON: number_sorting's scorer evaluates an answer that is not."""
    return {**row, "answer": json.dumps(parse_literal(row["answer"]))}


SAFE_ROWS: Mapping[str, Callable[[Row], dict[str, Any]]] = {"number_sorting": plain_list}
"""Task -> what is done to its row, so that the library's scorer finds nothing to evaluate."""


def _equation(given: str, row: Row, target: int, *, otherwise: tuple[float, float]) -> float:
    """1 when correct; else the first where nothing can be read, the second where the expression is wrong."""
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
        raise GrammarError("a number where a list is expected")
    return list(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise GrammarError("not text")
    return value
