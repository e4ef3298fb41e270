"""Detects functions that run text as Python: `eval` and the like, and sympy's `parse_expr`, which uses `eval`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsdk.rewards.functions.byte_code import names, package_of, reached

BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
"""Built-in functions that run text."""
SYMPY = frozenset({"parse_expr", "sympify", "S", "parse_latex", "parse_mathematica", "lambdify", "simplify", "diff",
                   "expand", "factor", "solve", "N", "Poly", "Eq", "integrate", "nsimplify"})  # fmt: skip
"""Functions of sympy that run text, or convert any argument to an expression, including text."""


def evaluates_text(function: Callable[..., Any]) -> str | None:
    """Returns the name that a function may use to run text as Python; None if there is none.

    Searches the byte-code of the function, and of functions that it calls by name in its own package. This is a
    heuristic for code without malicious intent, not a proof.
    """
    owner = getattr(function, "__self__", None)
    for at in reached(function):
        scope, used = at.__globals__, set(names(at.__code__))
        sympy = any(getattr(scope.get(name), "__name__", "").startswith("sympy") for name, plain in used if plain)
        for name, plain in sorted(used):
            value = scope.get(name) if plain else getattr(owner, name, None)
            if plain and value is None and name in BUILTINS:
                return name
            if name in SYMPY and (sympy if value is None else package_of(value) == "sympy"):
                return name
    return None
