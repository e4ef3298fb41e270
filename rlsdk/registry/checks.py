"""Checks specifications of plugins without importing any engine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from rlsdk.interfaces import (
    DTYPE_BYTES,
    INTERFACE_VERSION,
    BackendKind,
    BackendSpec,
    Capability,
    ComponentSpec,
    LogProbKind,
)
from rlsdk.registry.row import State
from rlsdk.system.printable import MESSAGE_CHARS, one_line, printable, shown

BACKEND_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
COMPONENT_NAME = re.compile(r"[A-Za-z0-9_*][A-Za-z0-9_.*+-]*")
IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def backend_nonsense(spec: object) -> str:
    """Problems of a registered backend's specification, as text; empty if there are none."""
    if not isinstance(spec, BackendSpec):
        return f"registered {shown(spec)} ({one_line(type(spec).__name__)}); expected a BackendSpec"
    return next(_backend_faults(spec), "")


def _backend_faults(spec: Any) -> Iterator[str]:
    """Yields every field of the wrong type; dataclasses do not check types, and a plugin may set anything."""
    if not isinstance(spec.name, str) or not BACKEND_NAME.fullmatch(spec.name):
        yield f"name {shown(spec.name)}: expected lower-case letters, digits and dashes"
    if not isinstance(spec.kind, BackendKind):
        yield f"kind {shown(spec.kind)}: expected one of {[f'BackendKind.{kind.name}' for kind in BackendKind]}"
    for field in ("engine", "options", "forecast"):
        value = getattr(spec, field)
        if not (_is_import_string(value) or (field != "engine" and value is None)):
            yield f"{field} {shown(value)}: expected 'package.module:Class'"
    if not _is_version(spec.interface):
        yield f"interface {shown(spec.interface)}: expected two whole numbers, like {INTERFACE_VERSION}"
    elif _newer_or_other(spec.interface):
        return  # It may use values that only another version knows; `interface_misfit` reports that.
    for capability in _members(spec.capabilities):
        if not isinstance(capability, Capability):
            yield f"capability {shown(capability)}: expected a member of Capability"
    for field, known in (("devices", {"cpu", "cuda"}), ("dtypes", set(DTYPE_BYTES))):
        values = _members(getattr(spec, field))
        if not values or not known.issuperset(values):
            yield f"{field} {shown(getattr(spec, field))}: expected some of {sorted(known)}"
    if spec.max_ranks is not None and not (isinstance(spec.max_ranks, int) and spec.max_ranks >= 1):
        yield f"max_ranks {shown(spec.max_ranks)}: expected a whole number of at least 1, or None"
    if not isinstance(spec.takes_weights, bool):
        yield f"takes_weights {shown(spec.takes_weights)}: expected True or False"
    if not isinstance(spec.log_prob_kind, LogProbKind):
        yield f"log_prob_kind {shown(spec.log_prob_kind)}: expected a member of LogProbKind"
    yield from _requirement_faults(spec.engine_requires)


def _requirement_faults(requires: object) -> Iterator[str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if not isinstance(requires, Mapping):
        yield f"engine_requires {shown(requires)}: expected a mapping of distribution to version specifier"
        return
    for distribution, specifier in requires.items():
        try:
            SpecifierSet(specifier)
        except (InvalidSpecifier, TypeError, AttributeError):
            yield f"engine_requires {shown(distribution)}: {shown(specifier)} is no version specifier, as '>=1.2,<2'"


def plain_backend(spec: BackendSpec) -> BackendSpec:
    """The specification with texts of exactly Python's own type, harmless to show, and of bounded length: a plugin may
    set a text whose hash or comparison fails."""

    def plain(value: Any) -> Any:
        if type(value) is str or not isinstance(value, str) or isinstance(value, Enum):
            return value
        return str.__str__(value)

    found = {field.name: plain(getattr(spec, field.name)) for field in dataclasses.fields(BackendSpec)}
    requires = {plain(name): plain(needed) for name, needed in dict(spec.engine_requires).items()}
    if any(type(text) is not str for pair in spec.engine_requires.items() for text in pair):
        found["engine_requires"] = requires
    for field in ("description", "install_hint"):
        found[field] = printable(str(found[field]), MESSAGE_CHARS)
    changed = {name: value for name, value in found.items() if value is not getattr(spec, name)}
    return dataclasses.replace(spec, **changed) if changed else spec


def component_state(spec: ComponentSpec) -> tuple[State, str]:
    """State of a component, from metadata alone: whether its registration is valid and its requirements are
    installed."""
    if nonsense := _component_nonsense(spec.name, spec.target):
        return State.BROKEN, nonsense
    if spec.requires and installed_version(spec.requires) is None:
        hint = f"; run `{spec.install_hint}`" if spec.install_hint else ""
        return State.ENGINE_MISSING, f"needs {spec.requires.replace('|', ' or ')}, not installed{hint}"
    return State.READY, ""


def _component_nonsense(name: object, target: object) -> str:
    """Problems of a registered component, as text; empty if there are none."""
    if not isinstance(name, str) or not COMPONENT_NAME.fullmatch(name):
        return f"name {shown(name)}: expected letters, digits, dots, dashes and underscores"
    if not (callable(target) or _is_import_string(target)):
        return f"target {shown(target)}: expected 'package.module:attribute' or something to call"
    return ""


CHANGED_IN_2 = {
    BackendKind.ROLLOUT: (
        "GenerationOutput.versions takes the place of policy_version and last_policy_version",
        "requests may have first_sample and response_ids",
        "hosts check states (asleep, no weights) in front of the engine",
        "num_decoded and kv_used are new",
    ),
    BackendKind.TRAIN: ("hosts check states (offloaded, frozen) in front of the engine",),
}
"""Hint for authors of plugins of interface 1."""
GUIDE = "docs/plugin_versions.md, 'From interface 1 to 2'"


def interface_misfit(spec: BackendSpec) -> str:
    """Reason why this rlsdk does not support the interface of the plugin; empty if it does."""
    if not _newer_or_other(spec.interface):
        return ""
    asked, served = (".".join(map(str, version)) for version in (spec.interface, INTERFACE_VERSION))
    older = spec.interface[0] < INTERFACE_VERSION[0]
    remedy = "a newer release of the plugin" if older else "a newer rlsdk"
    misfit = f"written for interface {asked}, this rlsdk serves {served}; install {remedy}"
    changed = CHANGED_IN_2.get(spec.kind, ()) if spec.interface[0] == 1 else ()
    return f"{misfit}. If it is yours: {'; '.join(changed)} ({GUIDE})" if changed else misfit


def engine_state(spec: BackendSpec) -> tuple[State, str]:
    """Compares installed engine versions with those the plugin was tested with, by metadata alone."""
    missing, untested = [], []
    for names, specifier in spec.engine_requires.items():
        found = installed_version(names)
        if found is None:
            missing.append(f"{names}{specifier}")
        elif not _within(found, specifier):
            untested.append(f"tested with {names}{specifier}, installed is {found}")
    if missing:
        hint = f"; run `{spec.install_hint}`" if spec.install_hint else ""
        return State.ENGINE_MISSING, f"needs {' and '.join(missing)}, not installed{hint}"
    return (State.UNTESTED, "; ".join(untested)) if untested else (State.READY, "")


def installed_version(names: str) -> str | None:
    """Version of the first installed distribution of `names` (alternatives split by `|`), or None."""
    for name in names.split("|"):
        try:
            found: str | None = importlib.metadata.version(name.strip())
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        if found:  # damaged metadata has no version
            return one_line(found)
    return None


def _within(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _newer_or_other(interface: tuple[int, int]) -> bool:
    return interface[0] != INTERFACE_VERSION[0] or interface[1] > INTERFACE_VERSION[1]


def _is_version(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value)


def _is_import_string(value: object) -> bool:
    return isinstance(value, str) and IMPORT_STRING.fullmatch(value) is not None


def _members(value: object) -> list[object]:
    return list(value) if isinstance(value, frozenset | set | tuple | list) else [value]
