"""reasoning-gym, imported without the plotting library that two of its hundred tasks bring along."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

SIMULATES = "cellpylib"
"""Two tasks simulate cells with it. It imports matplotlib, which is half of what importing all tasks costs."""


def import_reasoning_gym() -> ModuleType:
    """`reasoning_gym.factory`: the registry of tasks, and the functions that make and score them.

    Raises:
        ImportError: reasoning-gym is not installed.
    """
    with warnings.catch_warnings(), _imported_when_used(SIMULATES):
        # cellpylib compares literals with `is`, of which Python warns when it compiles the file.
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym.factory")


def may_have_task(name: str) -> bool:
    """Whether reasoning-gym's source holds this name in quotes, as it does for every task. Imports nothing: 20 ms."""
    spec = importlib.util.find_spec("reasoning_gym")
    folders = [] if spec is None else spec.submodule_search_locations or []
    quoted = f'"{name}"'.encode()
    return any(quoted in file.read_bytes() for folder in folders for file in Path(folder).rglob("*.py"))


@contextmanager
def _imported_when_used(name: str) -> Iterator[None]:
    """Modules that are imported in this block and import `name` get a stand-in for it.

    `importlib.util.LazyLoader` would do, but up to Python 3.11 the second `import` of such a module loads it.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        del sys.modules[name]


class _StandIn(ModuleType):
    """Imports the module of its name when an attribute is asked for."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system asks for these
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)
