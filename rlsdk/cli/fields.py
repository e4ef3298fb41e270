"""`--help` of the commands that take a run's configuration: its sections; the fields of one, with type, default and
meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from rlsdk.config import RunConfig
from rlsdk.config.checks.commands import READERS, TRAIN
from rlsdk.config.introspection.describe import OptionDoc, describe_options
from rlsdk.config.introspection.fields import annotation_at, option_fields, section_of
from rlsdk.config.loading.foreign_names import answer
from rlsdk.config.loading.other_names import meant_by
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.config.loading.reads import Reader
from rlsdk.config.loading.tree import Tree, read_tree_file
from rlsdk.config.loading.trust import TRUST_FLAG
from rlsdk.interfaces import ConfigError, nearest
from rlsdk.system.quantities import counted

WIDTH = 100
ALL = "all"
ITEM = "[]"
"""Stands in a path for the index in a list, as `rewards[].weight`."""


def command_help(command: str) -> str:
    """How a command takes fields, and the sections that it reads."""
    return "\n".join(_overview(command, _reader(command)))


def topic_help(command: str, topic: str) -> str:
    """The fields of a section, one field, or those of `all` sections, as far as the command reads them.

    Args:
        command: as typed behind `rlsdk`.
        topic: dotted path of a section or of a field, its last part, a short form, or `all`.

    Raises:
        ConfigError: it reads nothing of this name; names the nearest.
    """
    reader = _reader(command)
    own = _own_defaults(reader)
    options = [
        replace(option, default=own.get(option.path, option.default))
        for option in describe_options(RunConfig)
        if reader.may_read(option.path)
    ]
    name = ALIASES.get(topic, topic)
    exists = any(_is_in(option.path, [name]) for option in describe_options(RunConfig))
    names = [name] if exists else meant_by(name, reader.may_read)
    chosen = options if name == ALL else [option for option in options if _is_in(option.path, names)]
    if not chosen:
        raise ConfigError(f"--help {topic!r}: {_unread(name, command, exists, [option.path for option in options])}")
    return "\n".join(_described(chosen, whole=name in option_fields(RunConfig) or name == ALL))


def _reader(command: str) -> Reader:
    """`plan` and `chaos` take the arguments of `train`."""
    return READERS.get(command, TRAIN)


def _own_defaults(reader: Reader) -> Mapping[str, str]:
    """Dotted path -> default, where the command has one of its own."""
    if not reader.recipe:
        return {}
    tree = Tree()
    tree.merge_file(read_tree_file(Path(str(files("rlsdk.trainer") / "recipes" / reader.recipe))))
    return {".".join(map(str, place)): str(value) for place, value in tree.values()}


def _overview(command: str, reader: Reader) -> Iterator[str]:
    counts: dict[str, int] = {}
    for option in describe_options(RunConfig):
        if reader.may_read(option.path):
            name = option.path.partition(".")[0]
            counts[name] = counts.get(name, 0) + 1
    yield "\nFields of the configuration, as flags or in --config FILE; a later flag overrides an earlier one:"
    yield "  --a.b 1, --a.b=1, --a.b for true; lists and mappings as YAML: --train.optim.betas '[0.9, 0.95]'"
    yield "\nSections:"
    width = max(map(len, counts))
    for name, count in counts.items():
        size = counted(count, "field") if section_of(RunConfig.model_fields[name].annotation) else "list"
        yield f"  {name:<{width}}  {size:>9}  {RunConfig.model_fields[name].description}"
    example = f"rlsdk {command} --help {'rollout' if 'rollout' in counts else next(iter(counts))}"
    info = "rlsdk plugins info BACKEND"
    width = max(len(example), len(info))
    yield f"\n  {example:<{width}}  the fields of a section; also of a field, or `{ALL}`"
    yield f"  {info:<{width}}  a backend's own: --train.BACKEND.OPTION, --rollout.BACKEND.OPTION"
    yield "\nShort forms:"
    short = {f"--{flag}": field for flag, field in ALIASES.items() if reader.may_read(field)}
    yield textwrap.fill(", ".join(f"{flag} ({field})" for flag, field in short.items()), WIDTH, initial_indent="  ",
                        subsequent_indent="  ", break_on_hyphens=False)  # fmt: skip
    yield f"\n{TRUST_FLAG} also runs the code that a run's own config.yaml names: rewards, losses and callbacks in"
    yield "files or modules, code that comes with a model. Without the flag, such a configuration is refused."


def _is_in(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _described(options: Sequence[OptionDoc], *, whole: bool) -> Iterator[str]:
    """The options, with what their section is for if it is `whole`."""
    section = ""
    for option in options:
        name = option.path.partition(".")[0]
        if name != section:
            if whole:
                yield f"{'' if not section else chr(10)}{name}: {RunConfig.model_fields[name].description}"
            section = name
        yield from _option(option)
        yield from _items(option.path)


def _option(option: OptionDoc) -> Iterator[str]:
    yield f"  --{option.path}  {option.type}" + (f", default {option.default}" if option.default else "")
    yield textwrap.fill(option.doc, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _items(path: str) -> Iterator[str]:
    """The fields of the items of a list or of the values of a mapping."""
    place = tuple(path.split("."))
    inside = section_of(annotation_at(RunConfig, (*place, 0)))
    if inside is None or section_of(annotation_at(RunConfig, place)) is not None:
        return
    for option in describe_options(inside, f"{path}{ITEM}."):
        yield f"      {option.path}  {option.type}" + (f", default {option.default}" if option.default else "")
        yield textwrap.fill(option.doc, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)


def _unread(name: str, command: str, exists: bool, paths: Sequence[str]) -> str:
    """Why there is nothing to show of a name, and what to type."""
    if exists:
        return f"`rlsdk {command}` does not read it; `rlsdk {command} --help` shows what it reads"
    places = {".".join(path.split(".")[: at + 1]) for path in paths for at in range(path.count(".") + 1)}
    unknown = f"no section or field of `rlsdk {command}`{nearest(name, sorted(places))}"
    return answer(name) or f"{unknown}; `rlsdk {command} --help` shows its sections"
