"""Detects functions that run text as Python: `eval` and the like, and sympy's `parse_expr`, which uses `eval`."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

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
    package = _package(function)
    owner = getattr(function, "__self__", None)
    pending, seen = _functions(function), set[CodeType]()
    while pending:
        at = pending.pop()
        if not isinstance(at, FunctionType) or at.__code__ in seen:
            continue
        seen.add(at.__code__)
        scope = at.__globals__
        used = set(_names(at.__code__))
        sympy = any(getattr(scope.get(name), "__name__", "").startswith("sympy") for name, plain in used if plain)
        for name, plain in sorted(used):
            value = scope.get(name) if plain else getattr(owner, name, None)
            if plain and value is None and name in BUILTINS:
                return name
            if name in SYMPY and (sympy if value is None else _package(value) == "sympy"):
                return name
            if _package(value) == package:
                pending += _functions(value)
    return None


def _names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yields names that the code looks up; True: a global name of its module, False: an attribute of some object."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"):
            yield str(instruction.argval), instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _package(value: object) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _functions(value: Any) -> list[Any]:
    """Returns functions that a call of `value` may run: itself, functions it wraps or closes over, methods of a
    class."""
    if isinstance(value, type):
        return [getattr(member, "__func__", member) for member in vars(value).values()]
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType):
        inner = [
            getattr(value, "func", None),
            getattr(value, "__wrapped__", None),
            vars(type(value)).get("__call__"),
        ]
        return [part for part in inner if isinstance(part, FunctionType)]
    closed = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [function, *(part for part in closed if isinstance(part, FunctionType))]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
