"""Errors for names that cannot be used: the request, the reason, and the next step."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.interfaces import (
    BackendKind,
    DuplicatePluginError,
    InterfaceVersionError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    nearest,
)
from rlsdk.registry.discovery import CORE, DISABLED, normalized
from rlsdk.registry.known import FIRST_PARTY
from rlsdk.registry.row import PLUGIN, Kind, Row, State


def spoken(kind: str) -> str:
    """A kind in words."""
    return f"{kind} backend" if kind in tuple(BackendKind) else str(kind)


def unusable(kind: Kind, name: str, found: Sequence[Row]) -> PluginError:
    """The error for a name that is installed but not usable; `found` are its rows."""
    if clashing := [row for row in found if row.state is State.CLASH]:
        return _duplicate(kind, name, clashing)
    row = found[0]
    error_type = InterfaceVersionError if row.state is State.WRONG_INTERFACE else PluginLoadError
    error = error_type(f"{spoken(kind)} {name!r} ({row.source}) cannot be used: {row.reason}")
    error.__cause__ = row.error
    return error


def not_found(kind: Kind, name: str, rows: Sequence[Row]) -> PluginError:
    """The error for an unknown name: its plugin failed, it is misspelled, of another kind, or not installed."""
    if failed := _failed_plugin(kind, name, rows):
        verb = "left out" if failed.state is State.DISABLED else "broken"
        error = PluginLoadError(
            f"{spoken(kind)} {name!r}: plugin {failed.name!r} ({failed.source}) is {verb}: {failed.reason}"
        )
        error.__cause__ = failed.error
        return error
    usable = sorted(row.name for row in rows if row.kind == kind and row.state.usable)
    installed = f"installed: {', '.join(map(repr, usable)) or 'none'}"
    if others := _other_kinds(kind, name, rows):
        what = f"{name!r} is {' and '.join(map(_article, others))}, not {_article(spoken(kind))}"
        return PluginNotFoundError(f"{what} ({installed}){nearest(name, usable)}")
    installable = FIRST_PARTY.get(kind, {})
    if name in installable:
        hint = f"run `pip install {installable[name]}`"
        return PluginNotFoundError(f"{spoken(kind)} {name!r} is not installed; {installed}; {hint}")
    if name.endswith(".py"):
        return PluginNotFoundError(f"{spoken(kind)} {name!r}: expected FILE.py:FUNCTION, such as {name}:my_function")
    near = nearest(name, [*usable, *installable, *(row.name for row in rows if row.kind == kind)])
    for absent in installable.keys() - usable:
        if near.endswith(f"{absent!r}?"):
            near += f" Then run `pip install {installable[absent]}`"
    return PluginNotFoundError(f"{spoken(kind)} {name!r} is not installed ({installed}){near}")


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _other_kinds(kind: Kind, name: str, rows: Sequence[Row]) -> list[str]:
    others = {row.kind for row in rows if row.name == name and row.kind != PLUGIN}
    others |= {other for other, names in FIRST_PARTY.items() if isinstance(kind, BackendKind) and name in names}
    return sorted(spoken(other) for other in others - {kind})


def _duplicate(kind: Kind, name: str, clashing: Sequence[Row]) -> DuplicatePluginError:
    owners = " and by ".join(dict.fromkeys(str(row.source) for row in clashing))
    removable = sorted({row.source.distribution for row in clashing} - {CORE})
    remedy = f"; uninstall one, or set {DISABLED}={removable[-1]}" if removable else ""
    return DuplicatePluginError(f"{spoken(kind)} {name!r} is registered by {owners}{remedy}")


def _failed_plugin(kind: Kind, name: str, rows: Sequence[Row]) -> Row | None:
    """A plugin that failed to load and probably provides this name."""
    names = {normalized(name), normalized(FIRST_PARTY.get(kind, {}).get(name, name))}
    for row in rows:
        if row.kind == PLUGIN and names & {normalized(row.name), normalized(row.source.distribution)}:
            return row
    return None
