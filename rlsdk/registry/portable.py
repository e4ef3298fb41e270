"""Converts a plugin's specification to plain JSON and back, for plugins that this process cannot import.

Options are described field by field in a small language of types, from which `options_class` makes a dataclass that is
read, documented and validated like the plugin's own. Types that the language cannot express are `any`: the plugin's own
class checks them in its own process.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, LogProbKind

PLAIN_TYPES: Mapping[str, Any] = {"int": int, "float": float, "text": str, "bool": bool, "null": None, "any": Any}
DOC = "doc"
"""Key of a field's metadata with its documentation."""

_FROM_PLAIN: Mapping[str, Any] = {
    "kind": BackendKind,
    "interface": tuple,
    "capabilities": lambda names: frozenset(map(Capability, names)),
    "devices": frozenset,
    "dtypes": frozenset,
    "architectures": lambda names: None if names is None else frozenset(names),
    "log_prob_kind": LogProbKind,
}


def plain_spec(spec: BackendSpec) -> dict[str, Any]:
    """The specification as JSON values."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return {name: _plain(value) for name, value in values.items()}


def spec_from_plain(data: Mapping[str, Any]) -> BackendSpec:
    """Inverse of `plain_spec`. Fields that this version does not know are ignored.

    Raises:
        ValueError, TypeError: it has values that this version does not know.
    """
    known = {field.name for field in dataclasses.fields(BackendSpec)}
    values = {name: value for name, value in data.items() if name in known}
    return BackendSpec(**{name: _FROM_PLAIN.get(name, lambda same: same)(value) for name, value in values.items()})


def options_class(data: Mapping[str, Any]) -> type[Any]:
    """A dataclass with the fields of a description: `{"name": ..., "fields": [{"name", "type", "default", "doc"}]}`."""
    fields = []
    for entry in data["fields"]:
        keywords: dict[str, Any] = {"metadata": {DOC: entry.get("doc", "")}}
        annotation = _annotation(entry["type"])
        if "default" in entry:
            keywords |= _default(annotation, entry["default"])
        fields.append((entry["name"], annotation, dataclasses.field(**keywords)))
    return dataclasses.make_dataclass(data["name"], fields, kw_only=True, frozen=True)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, str) else value


def _annotation(described: Any) -> Any:
    """A type from its description: a word of `PLAIN_TYPES`, or a mapping with one key."""
    if isinstance(described, str):
        return PLAIN_TYPES[described]
    ((word, inside),) = described.items()
    if word == "section":
        return options_class(inside)
    if word == "literal":
        return typing.Literal[tuple(inside)]
    if word == "mapping":
        return dict[_annotation(inside[0]), _annotation(inside[1])]  # type: ignore[misc]
    if word == "list":
        return list[_annotation(inside)]  # type: ignore[misc]
    return typing.Union[tuple(map(_annotation, inside))]  # noqa: UP007 - made of a list


def _default(annotation: Any, value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return {"default_factory": lambda: annotation(**value)}
    if isinstance(value, list | dict):
        return {"default_factory": lambda: type(value)(value)}
    return {"default": value}
