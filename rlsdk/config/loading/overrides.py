"""The command line as dotted overrides: `--trainer.steps 100`, `--trainer.steps=100`, `--data.shuffle false`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsdk.config.problem import Problem, config_error
from rlsdk.interfaces import nearest
from rlsdk.interfaces.spelling import SHORT_FLAGS

FILE_FLAG = "config"
_ASSIGNMENT = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w]*(\.\w+)+=")
"""Hydra's `key=value`."""
RECIPE = ("algorithm", "recipe")
"""Where `--algorithm NAME` goes."""
ALIASES: Mapping[str, str] = {
    **{flag: path for path, flag in SHORT_FLAGS.items()},
    "steps": "trainer.steps",
    "seed": "trainer.seed",
    "resume": "trainer.resume",
}
"""Short flags, and the fields they set. `--reward` may be given several times."""


@dataclass(frozen=True)
class Override:
    """One value from the command line."""

    path: tuple[str, ...]
    text: str | None
    """Text as typed; None for a flag without a value, which means true."""
    flag: str
    """As typed, for messages."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Splits a command line into configuration files (`--config FILE`, repeatable) and overrides.

    A flag takes the next argument as its value unless that starts with `--`; a value that does is written
    `--flag=value`.

    Raises:
        ConfigError: an argument that belongs to no flag, with every such argument.
    """
    # Bytes in arguments that are not UTF-8 arrive as surrogates.
    if odd := [argument for argument in arguments if argument != argument.encode("utf-8", "replace").decode()]:
        raise config_error([Problem("", f"argument {argument!r}: expected UTF-8 text") for argument in odd])
    files: list[str] = []
    overrides: list[Override] = []
    problems: list[Problem] = []
    rest, assigned_words = _without_assignments(arguments)
    if assigned_words:
        problems.append(Problem("", _assignments(assigned_words)))
    while rest:
        argument = rest.pop(0)
        name, assigned, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            problems.append(Problem("", f"argument {argument!r}: {_expected(argument)}"))
            if argument.startswith("-") and rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value
            continue
        value = text if assigned else (rest.pop(0) if rest and not rest[0].startswith("--") else None)
        if nearest(name, ["help"]):
            problems.append(Problem("", f"argument {argument!r}: did you mean --help?"))
        elif name != FILE_FLAG:
            overrides.append(Override(tuple(ALIASES.get(name, name).split(".")), value, f"--{name}"))
        elif value is None:
            problems.append(Problem("", "--config: expected a file"))
        else:
            files.append(value)
    if problems:
        raise config_error(problems)
    return files, overrides


def _without_assignments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments, and apart from them those that are written `key=value`, if there are several."""
    words = [word for at, word in enumerate(arguments) if _ASSIGNMENT.match(word)
             and (not at or "=" in arguments[at - 1] or not arguments[at - 1].startswith("--"))]  # fmt: skip
    if len(words) < 2:
        return list(arguments), []
    return [word for word in arguments if word not in words], words


def _assignments(words: Sequence[str]) -> str:
    first = words[0].lstrip("+~").partition("=")
    return (
        f"{len(words)} arguments as {words[0]!r}: fields are flags here, such as `--trainer.steps 100`; `rlsdk migrate "
        f"run.sh` turns a command of verl into a run file, and says what {first[0]} is called"
    )


def _expected(argument: str) -> str:
    """Replaces an argument that belongs to no flag."""
    meant = f"-{argument}"
    is_flag = meant.partition("=")[0].removeprefix("--") in ALIASES or "." in meant
    if argument.startswith("-") and is_flag:
        return f"flags begin with two dashes: {meant}"
    if argument.endswith((".yaml", ".yml")):
        return f"expected a flag; a file is given as --config {argument}"
    return "expected a flag such as --trainer.steps 100"
