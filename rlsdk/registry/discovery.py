"""Finds installed plugins in package metadata, and loads each light entry module separately."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rlsdk.interfaces import ENTRY_POINT_GROUP
from rlsdk.registry.isolated import isolated_rows
from rlsdk.registry.load import MAX_NAMES, broken, load_rows
from rlsdk.registry.row import PLUGIN, Row, Source, State
from rlsdk.system.metadata import ENTRY_POINTS, metadata_problem
from rlsdk.system.printable import MESSAGE_CHARS, described, one_line, printable
from rlsdk.version import __version__

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
    builtin = Source(distribution=CORE, version=__version__, entry_point="builtin")
    rows = load_rows(lambda: importlib.import_module(BUILTIN_MODULE), builtin)
    seen = {CORE, builtin.entry_point}
    for entry, source in sorted(_entry_points(rows), key=lambda found: (found[1].distribution, found[1].entry_point)):
        seen |= {normalized(source.distribution), normalized(source.entry_point)}
        if refusal := selection.refusal(source):
            rows.append(Row(name=source.entry_point, kind=PLUGIN, source=source, state=State.DISABLED, reason=refusal))
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
        where = Source(distribution=one_line(str(getattr(distribution, "_path", distribution)), MESSAGE_CHARS))
        if problem := metadata_problem(distribution):
            rows.append(broken(where, f"its metadata cannot be read: {printable(problem)}"))
            continue
        try:
            if f"[{ENTRY_POINT_GROUP}]" not in (distribution.read_text(ENTRY_POINTS) or "").replace(" ", ""):
                continue
            source = _source(distribution)
            entries = [entry for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP]
        except Exception as error:
            rows.append(broken(where, f"its metadata cannot be read: {described(error)}", error))
            continue
        if normalized(source.distribution) in done:
            continue  # Later in sys.path, so Python would not import it.
        done.add(normalized(source.distribution))
        if len(entries) > MAX_NAMES:
            rows.append(broken(source, f"it has {len(entries):,} entry points; the first {MAX_NAMES} are loaded"))
        for entry in entries[:MAX_NAMES]:
            yield entry, replace(source, entry_point=one_line(entry.name))


def _source(distribution: importlib.metadata.Distribution) -> Source:
    """Name and version of a distribution, harmless to show.

    Raises:
        ValueError: the metadata lacks one, or is not UTF-8.
    """
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise ValueError(f"it has no {'Version' if name else 'Name'}")
    if "\ufffd" in f"{name}{version}":
        raise ValueError("its Name or Version is not UTF-8")
    return Source(distribution=one_line(name), version=one_line(version))


def normalized(name: str) -> str:
    """Normalized name of a distribution, as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(text: str) -> frozenset[str]:
    return frozenset(normalized(name.strip()) for name in text.split(",") if name.strip())
