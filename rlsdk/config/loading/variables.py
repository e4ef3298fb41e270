"""Finds environment variables in a configuration (`${DATA}/rows.jsonl`), which are not expanded, to report them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rlsdk.config.introspection.validation_errors import dotted
from rlsdk.config.problem import Problem
from rlsdk.interfaces.spelling import reader

VARIABLE = re.compile(r"\$\{\w+\}|\$[A-Z_][A-Z0-9_]*\b")
"""Variables in shell syntax; `$x` in a formula is not one."""
NAMES = frozenset({
    "path", "tokenizer", "revision", "train", "eval", "source", "run_dir", "run_name", "resume", "ray_address", "name",
    "backend",
})  # fmt: skip
"""Last parts of the paths of fields that hold a path, an address or a name; texts for a model may contain a dollar
sign."""


def variable_problems(data: Mapping[str, object]) -> Iterator[Problem]:
    """Problems of paths and names with a variable: they would be used literally, as the name of a folder."""
    for place, value in _texts(data, ()):
        named = [part for part in place if isinstance(part, str)]
        if named and named[-1] in NAMES and (hint := variable_hint(dotted(place), value)):
            yield Problem(dotted(place), hint, value=value)


def variable_hint(path: str, value: object) -> str:
    """Advice on a variable in the value of a field; empty without one."""
    if not isinstance(value, str) or not VARIABLE.search(value):
        return ""
    how = f'leave the field out, and let the shell do it: --{path} "{value}"'
    return f"environment variables are not replaced; {how if reader() is None else 'give os.path.expandvars(...)'}"


def _texts(value: object, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*place, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _texts(item, (*place, at))
    elif isinstance(value, str):
        yield place, value
