"""Other packages' functions, replaced for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(name: str, value: Any, *modules: ModuleType) -> Iterator[None]:
    """Inside, `name` is `value` in each of the modules that know it."""
    before = [(module, getattr(module, name)) for module in modules if hasattr(module, name)]
    for module, _ in before:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, own in before:
            setattr(module, name, own)
