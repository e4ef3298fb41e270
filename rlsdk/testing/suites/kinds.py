"""Finds the kinds of suites for a backend name. Imports neither pytest nor torch: it runs before pytest is required."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, PluginNotFoundError, nearest
from rlsdk.registry import Registry


def kinds_of(name: str, kind: BackendKind | None) -> list[BackendKind]:
    """Kinds of the usable backends with this name.

    Raises:
        PluginError: there is none.
    """
    registry = Registry.discover()
    rows = [row for row in registry.rows() if isinstance(row.kind, BackendKind)]
    kinds = [kind] if kind is not None else sorted({BackendKind(row.kind) for row in rows if row.name == name})
    if not kinds:
        names = sorted({row.name for row in rows})
        raise PluginNotFoundError(
            f"no backend is named {name!r}{nearest(name, names)}; installed: {', '.join(names)}. Other plugins have no "
            "conformance suite"
        )
    for found in kinds:
        registry.row(found, name)
    return kinds
