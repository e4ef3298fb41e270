"""Arguments of a tool against its schema: what a model wrote, told what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.interfaces import nearest

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def call_problem(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """Why arguments do not fit the parameters of a tool; None: they do."""
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in arguments:
        if name not in properties:
            return f"unknown argument {name!r}{nearest(name, properties)}; expected {sorted(properties)}"
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"missing argument {missing[0]!r}; expected {sorted(properties)}"
    problems = (value_problem(value, properties[name], name) for name, value in arguments.items())
    return next((problem for problem in problems if problem is not None), None)


def value_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """Why a value does not fit a JSON schema of type hints; None: it does."""
    if value is None and schema.get("nullable"):
        return None
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        fits = any(value_problem(value, choice, where) is None for choice in choices)
        return None if fits else f"argument {where!r} is {_shown(value)}; expected one of {list(choices)}"
    names = schema.get("type")
    kinds = [names] if isinstance(names, str) else list(names or ())
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"argument {where!r} is {_shown(value)}; expected {' or '.join(kinds)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"argument {where!r} is {_shown(value)}; expected one of {schema['enum']}"
    return _item_problem(value, schema, where)


def _item_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """Of an array's items, or an object's values."""
    parts: Sequence[tuple[str, Any, Any]] = ()
    if isinstance(value, list | tuple) and "items" in schema:
        parts = [(f"{where}[{at}]", item, schema["items"]) for at, item in enumerate(value)]
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        parts = [(f"{where}.{key}", item, schema["additionalProperties"]) for key, item in value.items()]
    problems = (value_problem(item, of_item, name) for name, item, of_item in parts)
    return next((problem for problem in problems if problem is not None), None)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if isinstance(value, float) and kind == "integer":
        return False
    return isinstance(value, _TYPES.get(kind, (object,)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
