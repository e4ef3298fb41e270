"""Looks up types by dotted path: the annotation of a field, and the keys that a mapping may have."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]


def option_fields(options: type[Any]) -> dict[str, Any]:
    """Name and annotation of each field of a dataclass or pydantic model; what a model inherits of a dataclass last."""
    if is_plain(options):
        hints = typing.get_type_hints(options, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(options) if field.init}
    fields: Mapping[str, Any] = getattr(options, "model_fields", {})
    inherited = {field.name for field in dataclasses.fields(options)} if dataclasses.is_dataclass(options) else set()
    return {name: fields[name].annotation for name in sorted(fields, key=lambda name: name in inherited)}


def is_plain(options: type[Any]) -> bool:
    """Whether it is a dataclass, and not a pydantic model that inherits one."""
    return dataclasses.is_dataclass(options) and not hasattr(options, "model_fields")


def is_section(annotation: Any) -> bool:
    """Whether a type is a dataclass or a pydantic model."""
    return isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields")
    )


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself; `Annotated` is unwrapped."""
    if typing.get_origin(annotation) is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for argument in typing.get_args(annotation) for member in members(argument))
    return (annotation,)


def section_of(annotation: Any) -> type[Any] | None:
    """The dataclass or pydantic model among the members of a union, if any."""
    return next((member for member in members(annotation) if is_section(member)), None)


def annotation_at(annotation: Any, path: Path) -> Any:
    """Annotation at `path` below a value of type `annotation`; `Any` if it is not declared."""
    for part in path:
        section = section_of(annotation)
        if section is not None:
            annotation = option_fields(section).get(str(part), Any)
        else:
            annotation = next((_item(member) for member in members(annotation)), Any)
    return annotation


def keys_at(annotation: Any, path: Path) -> Sequence[str]:
    """The keys that a mapping at `path` may have; empty if any key is allowed."""
    section = section_of(annotation_at(annotation, path))
    return sorted(option_fields(section)) if section is not None else ()


def _item(annotation: Any) -> Any:
    """Type of the items of a list, or of the values of a mapping."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is dict:
        return arguments[1]
    return arguments[0] if origin in (list, tuple, set, frozenset) and arguments else Any
