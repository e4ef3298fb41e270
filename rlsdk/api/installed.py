"""Lists what is installed: `rlsdk.plugins`, and the command of this name. Loads no engine and no configuration."""

from __future__ import annotations

from typing import Any

from rlsdk.api.table import Table
from rlsdk.interfaces import BackendKind, BackendSpec, ComponentSpec
from rlsdk.registry import ComponentKind, Registry, Row

HEADINGS = ("name", "distribution", "version", "interface", "state", "why")
"""Column headings of the table of plugins, which has a group of rows for each kind."""
KINDS = (*BackendKind, *ComponentKind)


def plugins() -> Table:
    """Lists every backend, component and plugin, usable or not; `state` and `why` give the reason.

    Returns:
        A row for each: `name`, `kind`, `distribution`, `version`, `state`, `why`, `capabilities`, ...
    """
    return Table(map(record, plugin_rows()))


def plugin_rows() -> list[Row]:
    """The registry's rows, grouped by kind."""
    return sorted(Registry.discover().rows(), key=lambda row: KINDS.index(row.kind) if row.kind in KINDS else -1)


def cells(row: Row) -> tuple[str, ...]:
    """Cells of a row, in the order of `HEADINGS`."""
    source = row.source
    return (row.name, source.distribution, source.version, row.interface, row.state, row.reason)


def record(row: Row) -> dict[str, Any]:
    """All fields of a row, as JSON values."""
    spec = row.spec
    made: dict[str, Any] = {"name": row.name, "kind": row.kind, **dict(zip(HEADINGS, cells(row), strict=True))}
    made["entry_point"] = row.source.entry_point
    if isinstance(spec, BackendSpec):
        made |= {"description": spec.description, "capabilities": sorted(spec.capabilities)}
        made["environment"] = row.isolation.environment if row.isolation else None
    elif isinstance(spec, ComponentSpec):
        made |= {"description": spec.description, "target": str(spec.target)}
    return made
