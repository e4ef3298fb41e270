"""Records which fields of a configuration are read while something runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
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


CHECKS = ("odd_numbers", "unused", "unused_in")
"""Functions that look at a configuration without an effect on what runs, besides those named `...problems`."""
ASIDE = ("/config/checks/", "/config/sections/influence.py", "/runs/made_by.py")
"""Files of such functions: checks, and the record beside the journal."""
HANDED_ON = ("<genexpr>", "<dictcomp>", "<listcomp>", "optim_spec", "shared")
"""Functions whose reads are those of their caller."""
PATHS: Mapping[type[Any], str] = dict(paths())


def _is_check(frame: FrameType | None) -> bool:
    """Whether a read is made for a check: by it, or by a property that it asks."""
    while frame is not None and ("/rlsdk/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        code = frame.f_code
        if code.co_name.endswith("problems") or code.co_name in CHECKS or any(p in code.co_filename for p in ASIDE):
            return True
        frame = frame.f_back
    return False


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Fields that are read in the block; checks of values, which have no other effect, are no reads."""
    found: Reads = {}

    def read(self: Section, name: str) -> Any:
        kind = type(self)
        if kind in PATHS and name in kind.__pydantic_fields__:
            frame = sys._getframe(1)
            while frame.f_code.co_name in HANDED_ON and frame.f_back:
                frame = frame.f_back
            if not _is_check(frame):
                found.setdefault(f"{PATHS[kind]}.{name}", set()).add(frame.f_code.co_name)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(Section, "__getattribute__", read)
        yield found
