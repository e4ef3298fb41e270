"""What a broken engine is: a class with one defect, and the requirements that must see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlsdk.interfaces import BackendKind, RolloutEngine, TrainEngine

T = TypeVar("T", bound=type)
MANAGER = "sharding manager"
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True)
class Defect:
    """A broken engine, and the requirements that it must fail. It may fail others too; tests run only these."""

    engine: type
    fails: Mapping[str, str]
    """Requirement -> words of the reason that its report gives."""
    ranks: bool = False
    """Whether it runs on several ranks."""
    forecast: Callable[..., Any] | None = None
    """What the backend forecasts with."""

    @property
    def kind(self) -> str:
        if issubclass(self.engine, RolloutEngine):
            return BackendKind.ROLLOUT.value
        return BackendKind.TRAIN.value if issubclass(self.engine, TrainEngine) else MANAGER

    @property
    def name(self) -> str:
        """Of the backend: `narrow-top-p` for the class NarrowTopP."""
        return _WORDS.sub("-", self.engine.__name__).lower()


DEFECTS: list[Defect] = []
"""Of all modules that were imported."""


def defect(
    fails: Mapping[str, str], *, ranks: bool = False, forecast: Callable[..., Any] | None = None
) -> Callable[[T], T]:
    """Decorates a broken engine; see `Defect`."""

    def note(engine: T) -> T:
        DEFECTS.append(Defect(engine, fails, ranks, forecast))
        return engine

    return note


def place(thing: Any) -> str:
    """Import string of a class or function."""
    return f"{thing.__module__}:{thing.__qualname__}"
