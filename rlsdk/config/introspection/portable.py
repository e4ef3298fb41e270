"""Describes a backend's options class in plain JSON; `rlsdk.registry.portable` rebuilds the class without the
plugin."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsdk.config.introspection.describe import option_defaults, option_texts
from rlsdk.config.introspection.fields import is_plain, is_section, option_fields
from rlsdk.registry import PLAIN_TYPES


def plain_options(options: type[Any]) -> dict[str, Any]:
    """Name and fields of a dataclass or pydantic model: type, default and docstring of each."""
    return {"name": options.__name__, "fields": list(_fields(options))}


def _fields(options: type[Any]) -> Iterator[dict[str, Any]]:
    texts, defaults = option_texts(options), option_defaults(options)
    for name, annotation in option_fields(options).items():
        entry: dict[str, Any] = {"name": name, "type": plain_type(annotation), "doc": texts.get(name, "")}
        if name in defaults:
            entry["default"] = _plain_value(defaults[name])
        yield entry


def plain_type(annotation: Any) -> Any:
    """A type in the notation of `rlsdk.registry.portable`; `any` if the notation has none."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return plain_type(arguments[0])
    if is_section(annotation):
        return {"section": plain_options(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"literal": [member.value for member in annotation]}
    if origin is typing.Literal:
        return {"literal": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"union": [plain_type(argument) for argument in arguments]}
    if origin in (dict, Mapping) and len(arguments) == 2:
        return {"mapping": [plain_type(argument) for argument in arguments]}
    if origin in (list, set, frozenset, Sequence) or (origin is tuple and arguments[-1:] == (Ellipsis,)):
        return {"list": plain_type(arguments[0])}
    words = {kind: word for word, kind in PLAIN_TYPES.items()} | {type(None): "null"}
    return words.get(annotation, "any")


def _plain_value(value: Any) -> Any:
    if is_plain(type(value)):
        return {field.name: _plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_value(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
