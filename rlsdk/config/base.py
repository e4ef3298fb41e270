"""What every section of the configuration is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from rlsdk.config.problem import Problem, rejected

Options = dict[str, JsonValue]
"""Parameters that only the named component or backend knows; validated by it."""
DeviceChoice = Literal["auto", "cpu", "cuda"]


class Section(BaseModel):
    """Base of every section: immutable, closed, strictly typed, described by the docstrings under its fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields of this section; paths are relative to it."""
        return iter(())

    @model_validator(mode="after")
    def _check(self) -> Self:
        if found := list(self.problems()):
            raise rejected(found)
        return self


def empty_tuple() -> Any:
    """An empty tuple by default, also read from a YAML list."""
    return Field(default=(), strict=False)


def empty_mapping() -> Any:
    """An empty mapping by default."""
    return Field(default_factory=dict)
