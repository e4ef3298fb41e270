"""What a function may call and import, read from its byte-code."""

from __future__ import annotations

import dis
import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType
from typing import Any


def reached(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """The function, those that it wraps, and those that each calls by name in its own package, each once."""
    owner = getattr(function, "__self__", None)
    pending, seen = _functions(function), set[CodeType]()
    while pending:
        at = pending.pop()
        if not isinstance(at, FunctionType) or at.__code__ in seen:
            continue
        seen.add(at.__code__)
        yield at
        for name, plain in sorted(set(names(at.__code__))):
            value = at.__globals__.get(name) if plain else getattr(owner, name, None)
            if package_of(value) == package_of(at):
                pending += _functions(value)


def import_ahead(function: Callable[..., Any]) -> None:
    """Imports what the function imports when it is called, so that its first call takes no longer than others. A module
    that is not there is the function's own affair."""
    for at in reached(function):
        if not at.__globals__.get("__package__"):  # in a package, names may be relative to it
            for name in _imports(at.__code__):
                with suppress(Exception):
                    importlib.import_module(name)


def _imports(code: CodeType) -> Iterator[str]:
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _imports(inner)


def names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yields names that the code looks up; True: a global name of its module, False: an attribute of some object."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"):
            yield str(instruction.argval), instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names(inner)


def package_of(value: object) -> str:
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
