"""A problem of a configuration, and the error that lists several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsdk.interfaces import ConfigError

if TYPE_CHECKING:
    from pydantic_core import PydanticCustomError

PROBLEMS = "rlsdk_problems"
"""Type of the pydantic error that carries a list of `Problem`s out of a validator."""


@dataclass(frozen=True)
class Problem:
    """One line of the message."""

    path: str
    """Dotted path of the field; empty if it is not about one field."""
    message: str
    """The repr of the value, what was expected, and the nearest valid name if there is one."""
    origin: str = ""
    """File or flag that the value came from; empty for a default."""

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {self.message}{where}" if self.path else f"{self.message}{where}"


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """The error that lists all `problems`, one per line."""
    if len(problems) == 1:
        return ConfigError(str(problems[0]))
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}")


def rejected(problems: Iterable[Problem]) -> PydanticCustomError:
    """The exception with which a pydantic validator reports several problems; paths are relative to its model."""
    from pydantic_core import PydanticCustomError

    found = tuple(problems)
    message = "; ".join(map(str, found)).replace("{", "{{").replace("}", "}}")
    return PydanticCustomError(PROBLEMS, message, {"problems": found})
