"""Records which fields of a configuration are read while something runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rlsdk.config import RunConfig
from rlsdk.config.introspection.fields import option_fields, section_of
from rlsdk.config.sections.base import Section

Reads = dict[str, set[str]]
"""Path of a field -> the functions that read it."""


def paths(section: type[Any] = RunConfig, prefix: str = "") -> Iterator[tuple[type[Any], str]]:
    """Class and path of every section that stands at one place."""
    for name, annotation in option_fields(section).items():
        inner = section_of(annotation)
        if inner is not None:
            yield inner, f"{prefix}{name}"
            yield from paths(inner, f"{prefix}{name}.")


CHECKS = ("odd_numbers", "unused", "unused_in", "_unused_in_value")
PATHS: Mapping[type[Any], str] = dict(paths())


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Fields that are read in the block; checks of values, which have no other effect, are no reads."""
    found: Reads = {}

    def read(self: Section, name: str) -> Any:
        kind = type(self)
        if kind in PATHS and name in kind.__pydantic_fields__:
            frame = sys._getframe(1)
            while frame.f_code.co_name in ("<genexpr>", "<dictcomp>", "<listcomp>", "optim_spec") and frame.f_back:
                frame = frame.f_back
            reader = frame.f_code.co_name
            if not reader.endswith("problems") and reader not in CHECKS:
                found.setdefault(f"{PATHS[kind]}.{name}", set()).add(reader)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(Section, "__getattribute__", read)
        yield found
