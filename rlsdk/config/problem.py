"""A problem of a configuration, and the error that lists several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.errors import closest
from rlsdk.interfaces.spelling import Setting

if TYPE_CHECKING:
    from pydantic_core import PydanticCustomError

UNKNOWN_KEY = "unknown key"
PROBLEMS = "rlsdk_problems"
"""Type of the pydantic error that carries a list of `Problem`s out of a validator."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with one field, as data. `str` is its line of an error, spelled for its reader: commands are flags,
    or keywords of a call."""

    path: str
    """Dotted path of the field; empty if it is not about one field."""
    message: str = ""
    """What is wrong; empty: the value is not what was expected. With a colon at its end it leads to the commands."""
    origin: str = ""
    """File or flag that the value came from; empty for a default."""
    _: KW_ONLY
    value: object = field(default=..., hash=False)
    """What was given; `...` if its value does not matter."""
    expected: str = ""
    """What is accepted."""
    suggestions: tuple[str, ...] = ()
    """Names that were probably meant: of a key or a value, or dotted paths of fields."""
    commands: tuple[Setting, ...] = field(default=(), hash=False)
    """Settings, each of which solves it."""
    hint: str = ""
    """What else may be the cause."""

    @property
    def is_unknown_key(self) -> bool:
        """Whether there is no field of this name."""
        return self.message == UNKNOWN_KEY

    @property
    def text(self) -> str:
        """The line without path and origin."""
        said = [self.message] if self.message else []
        if self.expected:
            said.append(f"expected {self.expected}")
        if self.suggestions:
            said.append(f"did you mean {' or '.join(map(_name, self.suggestions))}?")
        value = [] if self.value is ... else [shown(self.value)]
        line = ": ".join([*value, *(["; ".join(said)] if said else [])])
        if self.commands:
            line += " " if line.endswith(":") else "; give "
            line += " or ".join(f"`{command}`" for command in self.commands)
        return f"{line}; {self.hint}" if self.hint else line

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {self.text}{where}" if self.path else f"{self.text}{where}"


def unknown_key(path: str, key: str, valid: Sequence[str], value: object = ...) -> Problem:
    """The problem of a key that does not exist beside `valid`."""
    name, _, rest = key.partition(":")
    if name in valid:  # `{name:value}` is one key without a value
        return Problem(path, UNKNOWN_KEY, expected=f"`{name}: {rest}`, with a space behind the colon")
    if close := closest(key, valid):
        return Problem(path, UNKNOWN_KEY, value=value, suggestions=(close,))
    return Problem(path, UNKNOWN_KEY, value=value, expected=f"one of {', '.join(sorted(valid)) or 'none'}")


def shown(value: object, limit: int = 120) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _name(name: str) -> str:
    """A dotted path stands as it is, another name in quotes."""
    return name if "." in name else repr(name)


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """The error that lists all `problems`, one per line."""
    lines = "".join(f"\n  {problem}" for problem in problems)
    several = f"{len(problems)} problems in the configuration:{lines}"
    error = ConfigError(str(problems[0]) if len(problems) == 1 else several)
    error.problems = tuple(problems)
    return error


def rejected(problems: Iterable[Problem]) -> PydanticCustomError:
    """The exception with which a pydantic validator reports several problems; paths are relative to its model."""
    from pydantic_core import PydanticCustomError

    listed = tuple(problems)
    message = "; ".join(map(str, listed)).replace("{", "{{").replace("}", "}}")
    return PydanticCustomError(PROBLEMS, message, {"problems": listed})
