"""Translates pydantic's errors into problems: path, value, what was expected, nearest valid name, origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlsdk.config.problem import PROBLEMS, Problem, unknown_key
from rlsdk.interfaces.errors import closest

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]

MAPPING = "a mapping"
_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "list_type": "a list",
    "set_type": "a list",
    "dict_type": MAPPING,
    "model_type": MAPPING,
    "model_attributes_type": MAPPING,
    "dataclass_type": MAPPING,
    "dataclass_exact_type": MAPPING,
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "enum": "one of {expected}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
}


def explain(error: ValidationError, tree: Any, keys: Callable[[Path], Sequence[str]]) -> Iterator[Problem]:
    """Yields every problem of a failed validation, paths relative to `tree`.

    Args:
        error: what pydantic raised.
        tree: the data that was validated.
        keys: the valid keys of the mapping at a path, for the nearest name.
    """
    for detail in error.errors(include_url=False):
        path = _real_path(detail["loc"], tree)
        if detail["type"] == PROBLEMS:
            for problem in detail["ctx"]["problems"]:
                yield replace(problem, path=dotted((*path, problem.path)))
        else:
            yield _problem(detail, path, keys)


def dotted(path: Iterable[str | int]) -> str:
    """`trainer.steps`, `rewards.0.name`; empty parts are left out."""
    return ".".join(str(part) for part in path if part != "")


def _problem(detail: ErrorDetails, path: Path, keys: Callable[[Path], Sequence[str]]) -> Problem:
    kind, value, context, name = detail["type"], detail["input"], detail.get("ctx", {}), dotted(path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(name, str(path[-1]), keys(path[:-1]))
    if kind in ("missing", "missing_argument"):
        return Problem(name, "is required")
    if kind not in _EXPECTED:
        return Problem(name, detail["msg"], value=value)
    expected = _EXPECTED[kind].format(**context)
    choices = context.get("expected", "").replace(" or ", ", ").replace("'", "").split(", ")
    near = closest(value, choices) if kind in ("literal_error", "enum") and isinstance(value, str) else None
    known = keys(path) if expected == MAPPING else ()
    fields = f" with the keys {', '.join(known)}" if known else ""
    return Problem(name, value=value, expected=f"{expected}{fields}", suggestions=(near,) if near else ())


def _real_path(location: Sequence[str | int], tree: Any) -> Path:
    """The location without pydantic's own parts (union branches, `[key]`), which are not in the data."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(tree, Mapping) and (part in tree or (last and part != "[key]")):
            path.append(part)
            tree = tree.get(part)
        elif isinstance(tree, list | tuple) and isinstance(part, int) and part < len(tree):
            path.append(part)
            tree = tree[part]
    return tuple(path)
