"""What a broken engine is: a class with one defect, and the requirements that must see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsdk.interfaces import Capability


@dataclass(frozen=True)
class Defect:
    """A broken engine, and the requirements that it must fail. Others may fail too: what is wrong is seen from many
    sides, and only these are run in tests."""

    engine: str
    """Class, in `broken.rollout` or `broken.train`; `MODULE:Class` of another module of `broken`."""
    fails: Mapping[str, str]
    """Requirement -> words of the reason that its report gives."""
    lacks: frozenset[Capability] = frozenset()
    """Of the capabilities that the others claim."""

    def place(self, default: str) -> tuple[str, str]:
        """Module and class; `default` is the module of those that name none."""
        module, _, name = self.engine.rpartition(":")
        return f"broken.{module or default}", name
