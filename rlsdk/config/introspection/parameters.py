"""Options of a function: its keyword parameters, and whether values fit their annotations."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from rlsdk.config.introspection.validation_errors import explain
from rlsdk.config.problem import Problem, unknown_key


def keyword_parameters(function: Any) -> dict[str, inspect.Parameter] | None:
    """Keyword parameters after the first, positional one; None if it accepts any, or has no signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name: p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def option_problems(function: Any, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of options by their names and types; paths are relative to the options. Values of parameters without an
    annotation, or with one that only the function's module understands, are not checked."""
    known = keyword_parameters(function)
    if known is None:
        return
    for option, value in options.items():
        if option in known:
            yield from _of_type(function, known[option], value)
        else:
            yield unknown_key(option, option, sorted(known), value)


def _of_type(function: Any, parameter: inspect.Parameter, value: Any) -> Iterator[Problem]:
    from pydantic import TypeAdapter, ValidationError

    try:
        annotation = _annotation(function, parameter)
        adapter = TypeAdapter(dict[str, annotation])  # type: ignore[valid-type]
        given = json.dumps({parameter.name: value})
    except Exception:  # the annotation is of any kind, and the value may come from Python
        return
    try:
        # As JSON: strict types then still accept a list for a sequence.
        adapter.validate_json(given, strict=True)
    except ValidationError as error:
        # Of the members of a union, pydantic reports each.
        yield next(iter(explain(error, {parameter.name: value}, lambda path: ())))


def _annotation(function: Any, parameter: inspect.Parameter) -> Any:
    """The annotation, evaluated alone: others of the function may name types that only type checkers import."""
    if parameter.annotation is parameter.empty:
        return Any
    names = getattr(inspect.unwrap(function), "__globals__", {})

    def alone() -> None: ...

    alone.__annotations__ = {parameter.name: parameter.annotation}
    return typing.get_type_hints(alone, globalns=names)[parameter.name]
