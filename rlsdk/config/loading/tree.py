"""Nested plain data with the origin of each value: file and line, or flag."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsdk.config.introspection.validation_errors import dotted
from rlsdk.config.loading.variables import VARIABLE
from rlsdk.config.loading.yaml_text import read_yaml
from rlsdk.config.problem import Problem, shown
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.errors import nearest_file
from rlsdk.interfaces.spelling import as_given
from rlsdk.system.files import as_text, read_regular, read_regular_or_pipe

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class TreeFile:
    """The content of a YAML file."""

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[Place, int]
    """Line of each value."""


def read_tree_file(file: Path, *, may_be_pipe: bool = False) -> TreeFile:
    """Reads a YAML file of nested mappings.

    Args:
        file: its path.
        may_be_pipe: the user named it, as in `--config <(command)`; what a folder holds must be a regular file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or not a mapping.
    """
    try:
        text = as_text(read_regular_or_pipe(file) if may_be_pipe else read_regular(file))
    except FileNotFoundError as error:
        close = _near(file)
        if VARIABLE.search(str(file)):
            close = "; the shell replaces variables outside of single quotes only: write the name in double quotes"
        raise ConfigError(f"{as_given('config', str(file)[:200])}: no such file{close}") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{as_given('config', str(file)[:200])}: cannot be read: {why}") from error
    data, lines = read_yaml(text, str(file))
    if not isinstance(data, dict | None):
        raise ConfigError(f"{file}: {shown(data)}: expected a mapping of sections such as model, data, trainer")
    return TreeFile(file, data or {}, lines)


class Tree:
    """The values of a configuration before they are validated."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self._origins: dict[Place, str] = {}

    def merge_file(self, file: TreeFile) -> None:
        """Merges the content of a YAML file into the tree: mappings merge, other values are replaced."""
        _merge(self.data, copy.deepcopy(dict(file.data)))
        self._origins.update({place: f"{file.path}:{line}" for place, line in file.lines.items() if place})

    def merge(self, values: Mapping[str, Any], origin: str) -> None:
        """Merges nested plain data into the tree, as `merge_file` does."""
        _merge(self.data, copy.deepcopy(dict(values)))
        for place in _places(values, ()):
            self._forget(place)
            self._origins[place] = origin

    def section(self, name: str) -> dict[str, Any]:
        """The top-level mapping of that name; empty if there is none."""
        section = self.data.get(name)
        return section if isinstance(section, dict) else {}

    def put(self, place: Place, value: object, origin: str) -> Problem | None:
        """Sets one value, creating mappings on the way; returns the reason if that is impossible."""
        inside: Any = self.data
        for depth, part in enumerate(place):
            above = dotted(place[:depth])
            if isinstance(part, int) and not (isinstance(inside, list) and part < len(inside)):
                return Problem(above, f"has no item {part}", origin)
            if isinstance(part, str) and not isinstance(inside, dict):
                return Problem(above, f"{shown(inside)} has no field {part!r}", origin)
            if depth == len(place) - 1:
                inside[part] = value
            elif isinstance(part, str) and (inside.get(part) is None and isinstance(place[depth + 1], str)):
                inside[part] = {}
            inside = inside[part] if isinstance(part, int) else inside.get(part)
        self._forget(place)
        self._origins[place] = origin
        return None

    def move(self, old: Place, new: Place) -> None:
        """Merges the mapping at `old`, a key of a top-level section, into the one at `new`."""
        above = self.data[str(old[0])].pop(old[1])
        section = self.data[str(new[0])]
        section[new[1]] = section.get(new[1]) or {}
        _merge(section[new[1]], above)
        for place in [place for place in self._origins if place[: len(old)] == old]:
            self._origins[(*new, *place[len(old) :])] = self._origins.pop(place)

    def value(self, path: str) -> Any:
        """The value at a dotted path; None if there is none."""
        value: Any = self.data
        for part in path.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            else:
                value = (
                    value[int(part)] if isinstance(value, list) and part.isdigit() and int(part) < len(value) else None
                )
        return value

    def values(self) -> Iterator[tuple[Place, Any]]:
        """Places and values of everything that is not a mapping with values; of a list, and of its items."""
        return _leaves(self.data, ())

    def origin(self, path: str) -> str:
        """Origin of the value at a dotted path: its own, that of a value in it, or that of the mapping that contains
        it."""
        return self.origin_at(tuple(int(part) if part.isdigit() else part for part in path.split(".")))

    def origin_at(self, place: Place) -> str:
        """As `origin`, for keys that contain dots."""
        if place in self._origins:
            return self._origins[place]
        inside = [origin for known, origin in self._origins.items() if known[: len(place)] == place]
        around = [self._origins[place[:end]] for end in range(len(place) - 1, 0, -1) if place[:end] in self._origins]
        return next(iter(inside + around), "")

    def _forget(self, place: Place) -> None:
        for known in [known for known in self._origins if known[: len(place)] == place]:
            del self._origins[known]


def _leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*place, key))
        return
    if place:
        yield place, value
    for at, item in enumerate(value) if isinstance(value, list) else ():
        yield from _leaves(item, (*place, at))


def _places(values: Mapping[str, Any], above: Place) -> Iterator[Place]:
    """Places of all values that are not mappings: an empty mapping changes nothing of what it is merged into."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _places(value, (*above, key))
        else:
            yield (*above, key)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _near(file: Path) -> str:
    try:
        return nearest_file(file.absolute(), (".yaml", ".yml"))[0]
    except OSError:
        return ""
