"""Replaces functions of other packages for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def patched(name: str, value: Any, *owners: ModuleType | type) -> Iterator[None]:
    """Within the block, sets `name` to `value` in each of the given modules and classes that define it."""
    before = [(owner, vars(owner)[name]) for owner in owners if name in vars(owner)]
    for owner, _ in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, own in before:
            setattr(owner, name, own)
