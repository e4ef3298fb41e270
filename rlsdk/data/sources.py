"""Loads the rows of a source given by name: a registered source, a file, a folder, or a hub name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

from rlsdk.data.fields import find_fields
from rlsdk.data.files import (
    SUFFIXES,
    NoFileError,
    existing_file,
    kind_of_file,
    load_csv,
    load_json,
    load_parquet,
    local_path,
)
from rlsdk.data.hub import check_folder, load_folder, load_hub
from rlsdk.data.rows import DataRow, Fields, to_row
from rlsdk.interfaces import ConfigError, DataError, nearest
from rlsdk.registry import FIRST_PARTY, ComponentKind

__all__ = [
    "Loader",
    "SourceName",
    "check_source",
    "load_csv",
    "load_folder",
    "load_hub",
    "load_json",
    "load_parquet",
    "load_rows",
    "parse_source",
]

Loader: TypeAlias = Callable[..., Iterable[object]]
"""A `DataSource`; one of our own may yield `DataRow`s."""
INSTALLABLE = FIRST_PARTY[ComponentKind.DATASET]
"""Sources of plugins. The loader of one that is not installed cannot be resolved, and that error says what to run."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass(frozen=True, kw_only=True)
class SourceName:
    """The parsed name of a source."""

    kind: str
    """Name of a registered source."""
    rest: str
    """Argument of that source."""


def parse_source(name: str, kinds: Collection[str]) -> SourceName:
    """Parses `KIND:REST`, a file with a known suffix, a folder, or `org/name` of the hub. Loads nothing.

    Args:
        name: as typed.
        kinds: names of the registered sources.

    Raises:
        ConfigError: it is none of these, with the nearest registered name.
        DataError: it is not a valid file name.
    """
    if not name.strip():
        raise ConfigError(f"data source {name!r}: is empty; expected a file, a folder, org/name or SOURCE:REST")
    kind, colon, rest = name.partition(":")
    if colon and (kind in kinds or kind in INSTALLABLE):
        return SourceName(kind=kind, rest=rest)
    path = local_path(name)
    if (reader := kind_of_file(path)) is not None and not path.is_dir():
        return SourceName(kind=reader, rest=name)
    if path.is_dir() or local_path(name.rpartition(":")[0] or "?").is_dir():
        return SourceName(kind="folder", rest=name)
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        return SourceName(kind="hf", rest=name)
    near = nearest(kind, {*kinds, *INSTALLABLE})
    raise ConfigError(
        f"data source {name!r} is neither SOURCE:REST of a registered source{near}, nor a file that "
        f"ends in {', '.join(SUFFIXES)}, nor an existing folder, nor a hub name org/name. "
        f"Registered sources: {', '.join(sorted(kinds))}"
    )


def check_source(name: str, *, kinds: Collection[str], resolve: Callable[[str], Loader]) -> None:
    """Checks that a source exists, before anything is loaded or started.

    Args:
        name: as typed.
        kinds: names of the registered sources.
        resolve: the loader of a registered source.

    Raises:
        ConfigError: no such source, or the source has nothing of this name.
        DataError: no such file, or a folder without one.
    """
    source = parse_source(name, kinds)
    if source.kind in SUFFIXES.values():
        try:
            existing_file(source.rest)
        except NoFileError as error:
            if error.is_named:
                raise
            raise DataError(f"{error}. {_other_sources(kinds)}") from error
    elif source.kind == "folder":
        check_folder(source.rest)
    elif check := getattr(resolve(source.kind), "check", None):
        check(source.rest)


def _other_sources(kinds: Collection[str]) -> str:
    """Hint on other kinds of sources, for a missing file."""
    others = ["a folder saved by `datasets`", "a dataset of the hub (org/name)"]
    if makers := sorted({*kinds} - {*SUFFIXES.values(), "folder", "hf"}):
        others.append(f"one that makes its own rows ({', '.join(f'{kind}:...' for kind in makers)})")
    return f"Without a file, a source is {', '.join(others[:-1])} or {others[-1]}"


def load_rows(
    name: str,
    *,
    kinds: Collection[str],
    resolve: Callable[[str], Loader],
    options: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> list[DataRow]:
    """Loads the rows of a source.

    Args:
        name: as typed: see `parse_source`.
        kinds: names of the registered sources.
        resolve: the loader of a registered source.
        options: the source's own parameters.
        limit: most rows; None: all.

    Raises:
        ConfigError: no such source, or an option that it does not know.
        DataError: a row cannot be used, with file and line; or there are no rows.
    """
    source = parse_source(name, kinds)
    loader = resolve(source.kind)
    chosen = dict(options or {})
    parameters = _parameters(loader)
    _check_options(chosen, parameters, source)
    if limit is not None and "limit" in parameters:
        chosen.setdefault("limit", limit)
    loaded = enumerate(loader(source.rest, **chosen), 1)
    rows = [to_row(value, f"{name}:{number}") for number, value in islice(loaded, limit)]
    if not rows:
        raise DataError(f"{name}: has no rows")
    fields = find_fields(rows[0].row)
    return rows if fields == Fields() else [replace(row, fields=fields) for row in rows]


def _parameters(loader: Loader) -> Mapping[str, inspect.Parameter]:
    """Keyword parameters of a loader, without the first one, which gets `rest`."""
    return dict(list(inspect.signature(loader).parameters.items())[1:])


def _check_options(options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], source: SourceName) -> None:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            raise ConfigError(
                f"data source {source.kind!r} has no option {option!r}{nearest(option, parameters)}; "
                f"it has {sorted(parameters)}"
            )
