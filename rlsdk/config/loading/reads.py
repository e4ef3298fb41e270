"""What a command reads of a configuration, and what is said of values that were given and that it does not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsdk.config.introspection.validation_errors import dotted
from rlsdk.config.loading.other_names import same_meaning
from rlsdk.config.loading.tree import Place
from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import unused_in
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces.spelling import Setting


def all_used(config: RunConfig) -> Iterator[Problem]:
    """No field is without effect because of another one."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A command, and the fields that it reads."""

    command: str
    """As typed behind `rlsdk`."""
    fields: Collection[str]
    """Dotted paths of the fields that it may read; a section stands for all of its fields."""
    but: Collection[str] = ()
    """Paths below `fields` that it never reads."""
    unused: Callable[[RunConfig], Iterator[Problem]] = all_used
    """Yields fields that it does not read with these values of fields of other sections, and why; what depends on one
    section alone is known to `Section.unused`."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Field that it never reads -> what it uses in its place."""
    recipe: str = ""
    """File in `rlsdk/trainer/recipes` with defaults of its own."""

    def may_read(self, path: str) -> bool:
        """Whether it reads this field, or one of this section, with some values of the other fields."""
        if any(_covers(left_out, path) for left_out in self.but):
            return False
        return any(_covers(known, path) or _covers(path, known) for known in self.fields)

    def reads(self, path: str, config: RunConfig) -> bool:
        """Whether it reads this field with these values of the other fields."""
        unused = (*unused_in(config), *self.unused(config))
        return self.may_read(path) and not any(_covers(problem.path, path) for problem in unused)


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value that somebody gave; a list is one value, and so is each of its items."""

    place: Place
    value: Any
    origin: str
    """The flag, the call from Python, or file and line."""
    typed: bool
    """Whether it was given for this one command: as a flag, or in a call."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A part of a file that no command reads with these values of other fields, such as options of a backend that is
    not chosen."""

    path: str
    """Dotted."""
    origin: str
    """File and line."""
    why: str


def unread(
    given: Sequence[Given],
    config: RunConfig | None,
    reader: Reader,
    problems: Sequence[Problem] = (),
    idle: Sequence[Idle] = (),
) -> tuple[list[Problem], list[str]]:
    """What a command says of given values that it does not read.

    A file may serve several commands, so its fields are only named. A value that was given for this one command and
    that nothing reads is a mistake.

    Args:
        given: the values.
        config: the configuration with them; None if it cannot be read: then only what the command never reads is found.
        reader: the command.
        problems: found so far.
        idle: parts of files that no command reads.

    Returns:
        The problems of values that were given for this command, and `problems` of other fields; one line for each file.
    """
    unused: dict[str, str] = {}
    if config is not None:
        unused = {problem.path: problem.text for problem in (*unused_in(config), *reader.unused(config))}
    by_path = {dotted(one.place): one for one in given}
    whys = {path: why for path in by_path if (why := _why_unread(path, unused, reader)) is not None}
    unknown = {problem.path for problem in problems if problem.is_unknown_key}

    def acts(path: str) -> bool:
        return reader.may_read(path) and not any(_covers(known, path) for known in unused)

    typed = [path for path in whys if by_path[path].typed and not any(_covers(wrong, path) for wrong in unknown)]
    outer = [path for path in typed if not any(other != path and _covers(other, path) for other in typed)]
    refused = [_refused(by_path[path], path, whys[path], reader.command, same_meaning(path, acts)) for path in outer]
    others = [problem for problem in problems if not any(_covers(path, problem.path) for path in outer)]
    files = {} if config is None else _of_files([by_path[path] for path in whys if not by_path[path].typed], config)
    lines = {file: _summary(paths) for file, paths in files.items()}
    for one in idle:
        file, said = one.origin.rpartition(":")[0], f"{one.path} ({one.why})"
        lines[file] = f"{lines[file]}, {said}" if file in lines else said
    said_of = [f"{file}: `rlsdk {reader.command}` does not read {paths}" for file, paths in lines.items()]
    return [*refused, *others], said_of


def _of_files(given: Sequence[Given], config: RunConfig) -> Mapping[str, Sequence[str]]:
    """The fields of each file that differ from the defaults."""
    now, default = config.model_dump(), RunConfig().model_dump()
    files: dict[str, list[str]] = {}
    for one in given:
        if _at(now, one.place) != _at(default, one.place):
            files.setdefault(one.origin.rpartition(":")[0], []).append(dotted(one.place))
    return files


def _why_unread(path: str, unused: Mapping[str, str], reader: Reader) -> str | None:
    """Why a command does not read the value at a path, empty without a special reason; None if it reads it."""
    if not reader.may_read(path):
        return next((text for left_out, text in reader.instead.items() if _covers(left_out, path)), "")
    return next((because for known, because in unused.items() if _covers(known, path)), None)


def _refused(one: Given, path: str, why: str, command: str, acting: Sequence[str]) -> Problem:
    what = f"has no effect on `rlsdk {command}`"
    if why:
        return Problem(path, f"{what}: {why}; leave it out", one.origin)
    if not acting:
        return Problem(path, f"{what}, which does not read it; leave it out", one.origin)
    commands = tuple(Setting(other, _shown(one.value)) for other in acting)
    return Problem(path, f"{what}, which reads {acting[0]}:", one.origin, commands=commands)


def _shown(value: Any) -> Any:
    """A number or a word, which can be typed as it is; `...` for other values."""
    is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and value.isidentifier())
    return value if is_plain else ...


def _summary(paths: Sequence[str]) -> str:
    """The fields of a file, at most three of each section."""
    sections: dict[str, list[str]] = {}
    for path in paths:
        sections.setdefault(path.partition(".")[0], []).append(path)
    return ", ".join(
        name if len(fields) > MOST_NAMED or name in fields else ", ".join(fields) for name, fields in sections.items()
    )


MOST_NAMED = 3
"""Most fields of a section that a line names one by one."""


def _covers(above: str, path: str) -> bool:
    return f"{path}.".startswith(f"{above}.")


def _at(data: Any, place: Place) -> Any:
    for part in place:
        try:
            data = data[part]
        except (IndexError, KeyError, TypeError):
            return None
    return data
