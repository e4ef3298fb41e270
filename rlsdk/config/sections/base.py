"""Base class and field helpers of the sections of the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema

from rlsdk.config.introspection.describe import option_texts
from rlsdk.config.problem import Problem, rejected

Options = dict[str, JsonValue]
"""Parameters that the named component or backend defines and validates."""
DeviceChoice = Literal["auto", "cpu", "cuda"]


FIELDS_ONLY = {"fields_only": True}
"""Validation context: check each field alone; `problems_in` reports problems between fields."""


FLOAT32 = (2.0**-126, (2.0 - 2.0**-23) * 2.0**127)
"""Smallest and largest size of a normal 32-bit number: what a value becomes in an engine's tensors."""


class Section(BaseModel):
    """Base of every section: immutable, strictly typed, unknown keys refused; docstrings under fields describe them."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def problems(self) -> Iterator[Problem]:
        """Yields problems between fields of this section; paths are relative to it."""
        return iter(())

    def unused(self) -> Iterator[Problem]:
        """Yields fields that nothing reads because of the values of other fields of this section, and why."""
        return iter(())

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the meaning of inherited fields, which pydantic reads from a class's own source only."""
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in option_texts(cls).items():
            if name in own and cls.model_fields[name].description is None:
                own[name]["description"] = text
        return schema

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if info.context != FIELDS_ONLY and (found := [*odd_numbers(self), *self.problems()]):
            raise rejected(found)
        return self


def problems_in(section: Section, path: str = "") -> Iterator[Problem]:
    """Yields problems between the fields of a section and of all sections in it, the inner ones first."""
    within = [found for name in type(section).model_fields for found in _in_value(getattr(section, name), name)]
    try:
        own = [*odd_numbers(section), *section.problems()]
    except (ArithmeticError, LookupError, TypeError, ValueError):
        if not within:
            raise
        own = []  # Caused by values that are already refused.
    for problem in (*within, *own):
        yield replace(problem, path=f"{path}.{problem.path}" if path and problem.path else path or problem.path)


def odd_numbers(section: Section) -> Iterator[Problem]:
    """Problems of numbers that are 0 or infinite as 32-bit numbers, in fields that hold numbers."""
    for name, field in type(section).model_fields.items():
        if "JsonValue" not in str(field.annotation):
            yield from _odd_numbers(getattr(section, name), name)


def _odd_numbers(value: object, path: str) -> Iterator[Problem]:
    if isinstance(value, float) and value and not FLOAT32[0] <= abs(value) <= FLOAT32[1]:
        yield Problem(path, value=value, expected=f"0, or a size from {FLOAT32[0]:.2g} to {FLOAT32[1]:.2g}: float32")
    elif isinstance(value, tuple | dict):
        for at, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _odd_numbers(item, f"{path}.{at}")


def unused_in(section: Section, path: str = "") -> Iterator[Problem]:
    """Yields what `Section.unused` yields of a section and of all sections in it."""
    for name in type(section).model_fields:
        yield from _unused_in_value(getattr(section, name), f"{path}.{name}" if path else name)
    for found in section.unused():
        yield replace(found, path=f"{path}.{found.path}" if path else found.path)


def _unused_in_value(value: object, path: str) -> Iterator[Problem]:
    if isinstance(value, Section):
        yield from unused_in(value, path)
    elif isinstance(value, tuple | dict):
        for at, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unused_in_value(item, f"{path}.{at}")


def steps_of_share(warmup_ratio: float | None) -> Iterator[Problem]:
    """`warmup_steps` beside the share of all steps."""
    if warmup_ratio is not None:
        yield Problem("warmup_steps", f"warmup_ratio is {warmup_ratio:g}")


def unused_revision(path: str | None) -> Iterator[Problem]:
    """`revision` of a model whose path is a folder."""
    if path is not None and os.path.isdir(path):
        yield Problem("revision", f"its path {path!r} is a folder, and only a name on the hub has revisions")


def fields_of(names: Iterable[str], because: str) -> Iterator[Problem]:
    """These fields, which nothing reads for one reason."""
    return (Problem(name, because) for name in names)


def _in_value(value: object, path: str) -> Iterator[Problem]:
    if isinstance(value, Section):
        yield from problems_in(value, path)
    elif isinstance(value, tuple):
        for at, item in enumerate(value):
            yield from _in_value(item, f"{path}.{at}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _in_value(item, f"{path}.{key}")


def empty_tuple() -> Any:
    """A field with an empty tuple as default; accepts a YAML list."""
    return Field(default=(), strict=False)


def empty_mapping() -> Any:
    """A field with an empty mapping as default."""
    return Field(default_factory=dict)
