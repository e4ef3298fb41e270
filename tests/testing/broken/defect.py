"""What a broken engine is: a class with one defect, and the requirements that must see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsdk.interfaces import Capability


@dataclass(frozen=True)
class Defect:
    """A broken engine, and the requirements that it must fail. It may fail others too; tests run only these."""

    engine: str
    """`MODULE:Class` in the package `broken`; each module is one family of defects."""
    fails: Mapping[str, str]
    """Requirement -> words of the reason that its report gives."""
    lacks: frozenset[Capability] = frozenset()
    """Capabilities that it does not claim, although the other engines of its kind do."""
    forecast: str = ""
    """`MODULE:function` of a module of `broken`, that the backend forecasts with."""

    @property
    def place(self) -> str:
        """Import string of the class."""
        return f"broken.{self.engine}"
