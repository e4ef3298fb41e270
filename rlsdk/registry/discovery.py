"""Finds installed plugins in package metadata, and loads each light entry module separately."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import rlsdk
from rlsdk.interfaces import ENTRY_POINT_GROUP
from rlsdk.registry.isolated import isolated_rows
from rlsdk.registry.load import broken, load_rows
from rlsdk.registry.row import PLUGIN, Row, Source, State

ONLY = "RLSDK_PLUGINS"
"""Environment variable: load only these plugins (entry points or distributions, separated by commas)."""
DISABLED = "RLSDK_DISABLE_PLUGINS"
"""Environment variable: do not load these plugins. Built-ins are always loaded."""
CORE = "rlsdk"
BUILTIN_MODULE = "rlsdk.builtin"


@dataclass(frozen=True)
class Selection:
    """The plugins selected by environment variables."""

    only: frozenset[str] | None
    without: frozenset[str]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Selection:
        only = _names(environ.get(ONLY, ""))
        return cls(only or None, _names(environ.get(DISABLED, "")))

    def refusal(self, source: Source) -> str:
        """Reason why this plugin is not loaded; empty if it is."""
        names = {normalized(source.distribution), normalized(source.entry_point)}
        if self.without & names:
            return f"left out by {DISABLED}"
        return f"not among those of {ONLY}" if self.only is not None and not self.only & names else ""


def discover_rows(environ: Mapping[str, str] | None = None) -> list[Row]:
    """Rows of the built-ins and of every installed plugin, in the order of their distributions' names."""
    selection = Selection.from_environment(os.environ if environ is None else environ)
    builtin = Source(distribution=CORE, version=rlsdk.__version__, entry_point="builtin")
    rows = load_rows(lambda: importlib.import_module(BUILTIN_MODULE), builtin)
    seen = {CORE, builtin.entry_point}
    for entry, source in sorted(_entry_points(rows), key=lambda found: (found[1].distribution, found[1].entry_point)):
        seen |= {normalized(source.distribution), normalized(source.entry_point)}
        if refusal := selection.refusal(source):
            rows.append(Row(name=entry.name, kind=PLUGIN, source=source, state=State.DISABLED, reason=refusal))
        else:
            rows += load_rows(entry.load, source)
    rows = _with_isolated(rows, isolated_rows(environ), selection)
    seen |= {normalized(name) for row in rows for name in (row.source.distribution, row.source.entry_point)}
    for name in sorted((selection.only or frozenset()) - seen):
        rows.append(broken(Source(distribution=name), f"named by {ONLY}, but no such plugin is installed"))
    return rows


def _with_isolated(rows: list[Row], isolated: Iterable[Row], selection: Selection) -> list[Row]:
    """Adds plugins that have their own environments.

    If such a plugin is also installed here and usable, this installation is used. If it is not usable here, because its
    engine is missing, that of the other environment is used.
    """
    by_distribution: dict[str, list[Row]] = {}
    for row in isolated:
        by_distribution.setdefault(normalized(row.source.distribution), []).append(row)
    for name, theirs in by_distribution.items():
        here = [row for row in rows if normalized(row.source.distribution) == name]
        if any(row.state.usable or row.state is State.DISABLED for row in here):
            continue
        rows = [row for row in rows if row not in here]
        for row in theirs:
            refusal = selection.refusal(row.source)
            rows.append(replace(row, state=State.DISABLED, reason=refusal) if refusal else row)
    return rows


def _entry_points(rows: list[Row]) -> Iterator[tuple[importlib.metadata.EntryPoint, Source]]:
    """Yields the entry points of the group `rlsdk`; a distribution with unreadable metadata is added to `rows`.

    Names and versions are read only for distributions with such an entry point: parsing the metadata of every installed
    distribution would take longer than everything else.
    """
    done = {normalized(CORE)}
    for distribution in importlib.metadata.distributions():
        try:
            if f"[{ENTRY_POINT_GROUP}]" not in (distribution.read_text("entry_points.txt") or "").replace(" ", ""):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            entries = [entry for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP]
        except Exception as error:
            where = Source(distribution=str(getattr(distribution, "_path", distribution)))
            rows.append(broken(where, f"its metadata cannot be read: {type(error).__name__}: {error}", error))
            continue
        if normalized(name) in done:
            continue  # Later in sys.path, so Python would not import it.
        done.add(normalized(name))
        for entry in entries:
            yield entry, Source(distribution=name, version=version, entry_point=entry.name)


def normalized(name: str) -> str:
    """Normalized name of a distribution, as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(text: str) -> frozenset[str]:
    return frozenset(normalized(name.strip()) for name in text.split(",") if name.strip())
