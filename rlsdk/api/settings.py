"""Settings of a run before they are checked: flags as typed, files, and values from Python."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.config.loading.foreign_names import answer
from rlsdk.config.loading.load import Loaded, read_config
from rlsdk.config.loading.other_names import every, known_elsewhere, meant_by
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.config.loading.reads import Reader
from rlsdk.config.loading.trust import TRUST_FLAG
from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.spelling import Setting
from rlsdk.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sources of a configuration; later ones override: `files`, then `values`, then `flags`."""

    files: Sequence[Path] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields as nested mappings, as in YAML: `{"trainer": {"steps": 10}}`."""
    flags: Sequence[str] = ()
    """Arguments as on the command line: `--trainer.steps`, `10`."""

    @property
    def names_a_task(self) -> bool:
        """Whether a model, data or a file is given; otherwise the quickstart's recipe is the base."""
        flags = {flag.split("=")[0] for flag in self.flags}
        named = {"--model", "--model.path", "--data", "--data.train", "--config"}
        data = self.values.get("data", {})
        given = self.values.get("model", {}).get("path") or data.get("train") or data.get("mixture")
        return bool(self.files or given or flags & named) or any(f.startswith("--data.mixture") for f in flags)

    def given(self, path: str, value: object) -> Settings:
        """A copy with one more value, which flags override.

        Raises:
            ConfigError: another value of this field is among the values.
        """
        values = copy.deepcopy(dict(self.values))
        _put(values, path.split("."), value, path)
        return replace(self, values=values)

    def read(self, registry: Registry, reader: Reader, base: Sequence[Path] = ()) -> Loaded:
        """Reads the configuration of a command on top of the files `base`, and its problems: see `read_config`.

        Raises:
            ConfigError: a file cannot be read, or a run asks for code without permission.
        """
        files = [*base, *self.files]
        return read_config(files, list(self.flags), registry, values=self.values, reader=reader)


def from_keywords(
    fields: Mapping[str, Any],
    reader: Reader | None = None,
    *,
    config: str | os.PathLike[str] | None,
    trust_run: bool,
    **named: Any,
) -> Settings:
    """The settings of a call from Python.

    Args:
        fields: sections as mappings (`trainer={"steps": 10}`), or single fields under their dotted names, with two
            underscores for each dot where that is more convenient (`data__num_eval_rows=4`).
        reader: the command of this name, so that only fields that it reads are suggested; None: any field.
        config: a YAML file, which all other settings override.
        trust_run: as the flag `--trust-run`.
        named: fields with an argument of their own, with two underscores for a dot; None: not set.

    Raises:
        ConfigError: a keyword is no section and no dotted name; names the field that was probably meant.
    """
    values: dict[str, Any] = {}
    paths = {name: _dotted(name) for name in fields}
    unknown = {n: fields[n] for n, path in paths.items() if "." not in path and path not in RunConfig.model_fields}
    if unknown:
        raise ConfigError(_all_unknown(unknown, reader))
    for name, value in fields.items():
        _put(values, paths[name].split("."), plain(value), paths[name])
    flags = [TRUST_FLAG] if trust_run else []
    for name, value in named.items():
        if name == "algorithm__recipe" and value is not None:
            flags.append(f"--algorithm={value}")  # a named recipe overrides the file, and fields override the recipe
        elif value is not None:
            _put(values, name.split("__"), plain(value), name.replace("__", "."))
    return Settings(files=[Path(config)] if config is not None else [], values=values, flags=flags)


def _dotted(name: str) -> str:
    """`data__num_eval_rows` as the path that it stands for."""
    section, _, inside = name.partition("__")
    is_path = bool(inside) and "." not in name and section in RunConfig.model_fields
    return name.replace("__", ".") if is_path else name


def plain(value: Any) -> Any:
    """The value as plain data, as in YAML: mappings, lists, numbers, strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)  # numbers of numpy and torch
    return item() if callable(item) and not isinstance(value, bool | int | float | str) else value


def _put(values: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    """Merges a value into a mapping.

    Raises:
        ConfigError: the field is given twice.
    """
    inside = values
    for part in path[:-1]:
        inside = inside.setdefault(part, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{name}: given twice, and {part!r} is no mapping in one of the two; give it once")
    last = path[-1]
    if isinstance(value, dict) and isinstance(inside.get(last), dict):
        for key, item in value.items():
            _put(inside[last], [key], item, f"{name}.{key}")
    elif last in inside and inside[last] != value:
        raise ConfigError(f"{name}: given twice, as {inside[last]!r} and as {value!r}; give it once")
    else:
        inside[last] = value


def _all_unknown(unknown: Mapping[str, Any], reader: Reader | None) -> str:
    """Message on all keywords that are no sections; the list of sections is in it once."""
    lines: list[str] = []
    for name, value in unknown.items():
        line = _unknown(name, value, reader)
        sections = line.partition("; the sections are ")[2]
        is_listed = bool(sections) and any(sections in other for other in lines)
        lines.append(line.partition("; the sections are ")[0] if is_listed else line)
    return lines[0] if len(lines) == 1 else f"{len(lines)} unknown keywords:" + "".join(f"\n  {line}" for line in lines)


def _unknown(name: str, value: Any, reader: Reader | None) -> str:
    """Message on a keyword that is no section, with the fields that this command reads."""
    reads = every if reader is None else reader.may_read
    if reader is not None and name in ALIASES and not reads(ALIASES[name]):
        return f"{name}: has no effect on `rlsdk {reader.command}`, which does not read it; leave it out"
    meant = meant_by(name, reads)
    if instead := answer(name):
        return f"{name}: unknown keyword; {instead}"
    if meant and all(path.rpartition(".")[2] == name for path in meant) and not known_elsewhere(name):
        called = " or ".join(Setting(path, value).as_keyword() for path in meant[:3])
        return f"{name}: is no section of the configuration, but a field of one; write {called}"
    if meant:
        called = " or ".join(Setting(path, value).as_keyword() for path in meant[:2])
        return f"{name}: unknown keyword; did you mean {called}?"
    sections = [section for section in RunConfig.model_fields if reads(section)]
    return f"{name}: unknown keyword{nearest(name, sections)}; the sections are {', '.join(sections)}"
