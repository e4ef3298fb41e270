"""Checks every installed plugin: whether it loads, and whether its engine is installed, of a tested version, and can be
imported."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rlsdk.diagnosis.finding import Finding, Health
from rlsdk.diagnosis.packages import IMPORT_TIMEOUT_S, install
from rlsdk.diagnosis.probe import Answer, ask
from rlsdk.diagnosis.recipes import recipe_of, unmet
from rlsdk.interfaces import BackendSpec
from rlsdk.registry import Registry, Row, State

MAX_PROCESSES = 2
"""Most concurrent imports: importing a large engine keeps a processor busy for many seconds."""
IMPORTS = """
import importlib, importlib.metadata
for name in sys.argv[2:]:
    importlib.import_module(name)
module, _, attribute = sys.argv[1].partition(":")
found = importlib.import_module(module)
for part in attribute.split("."):
    found = getattr(found, part)
answer()
"""
IMPORTS_THERE = """
import importlib
from rlsdk.diagnosis.plugins import import_names
for names in sys.argv[2:]:
    for name in import_names(names):
        importlib.import_module(name)
module, _, attribute = sys.argv[1].partition(":")
getattr(importlib.import_module(module), attribute)
answer()
"""
Probe = Callable[[BackendSpec], Answer]


def plugins(rows: Iterable[Row] | None = None, probe: Probe | None = None, *, device: str = "cpu") -> Iterator[Finding]:
    """A finding for each backend, and for each component or plugin that cannot be used.

    Args:
        rows: what is installed; None: discovered now.
        probe: imports a backend's engine; None: in its own process.
        device: kind of device that runs use here, for which a plugin's recipe may ask for more packages.
    """
    rows = list(Registry.discover().rows() if rows is None else rows)
    probe = import_engine if probe is None else probe
    backends = [row for row in rows if isinstance(row.spec, BackendSpec)]
    importable = [row for row in backends if row.state.usable]
    with ThreadPoolExecutor(MAX_PROCESSES) as pool:
        answers = dict(zip(map(id, importable), pool.map(lambda row: _asked(row, probe), importable), strict=True))
    for row in rows:
        if id(row) in answers:
            yield _engine(row, answers[id(row)])
            yield from _recipe(row, device)
        elif not row.state.usable and not _only_lacks_an_extra(row):
            yield _unusable(row)


def _asked(row: Row, probe: Probe) -> Answer:
    """Imports a backend's engine in its own environment."""
    spec = _spec(row)
    if row.isolation is None:
        return probe(spec)
    names = list(spec.engine_requires)
    return ask(IMPORTS_THERE, spec.engine, *names, timeout_s=IMPORT_TIMEOUT_S, python=row.isolation.python)


def import_engine(spec: BackendSpec) -> Answer:
    """Imports the engine's own packages, then the plugin's class."""
    names = [name for names in spec.engine_requires for name in import_names(names)]
    return ask(IMPORTS, spec.engine, *names, timeout_s=IMPORT_TIMEOUT_S)


def import_names(names: str) -> list[str]:
    """Modules of the first installed distribution of `names` (separated by `|`)."""
    for name in names.split("|"):
        try:
            listed = (importlib.metadata.distribution(name.strip()).read_text("top_level.txt") or "").split()
        except importlib.metadata.PackageNotFoundError:
            continue
        return [module for module in listed if _plain(name).startswith(_plain(module))]
    return []


def _engine(row: Row, answer: Answer) -> Finding:
    spec = _spec(row)
    check = f"{row.kind} {row.name}"
    if answer.facts is None:
        said = f"{row.source}: its engine cannot be imported: {answer.error}"
        return Finding(check=check, state=Health.FAULT, found=said, fix=_reinstall(row))
    if row.state is State.UNTESTED:
        within = [f"{_installed(names)}{specifier}" for names, specifier in spec.engine_requires.items()]
        said = f"{row.source}: {row.reason}"
        fix = install(*within) if row.isolation is None else _reinstall(row)
        return Finding(check=check, state=Health.WARNING, found=said, fix=fix)
    if row.isolation is not None:
        has = ", ".join(f"{name} {version}" for name, version in row.isolation.versions.items())
        return Finding(check=check, state=Health.OK, found=f"{row.source}, {row.reason}: {has}")
    tested = ", ".join(
        f"{_installed(names)} {importlib.metadata.version(_installed(names))} (tested {specifier})"
        for names, specifier in spec.engine_requires.items()
    )
    return Finding(check=check, state=Health.OK, found=f"{row.source}" + (f": {tested}" if tested else ""))


def _recipe(row: Row, device: str) -> Iterator[Finding]:
    """What the engine's recipe asks for on this device and this environment lacks. An environment of its own was made
    by the recipe."""
    if row.isolation is not None:
        return
    for wanted, found in unmet(recipe_of(_spec(row).engine, device)):
        said = f"{row.source}: on {device} its engine is meant to run with {wanted}; here: {found}"
        yield Finding(check=f"{row.kind} {row.name}", state=Health.WARNING, found=said, fix=install(wanted))


def _unusable(row: Row) -> Finding:
    check = f"{row.kind} {row.name}"
    if row.state is State.DISABLED:
        return Finding(check=check, state=Health.OK, found=f"{row.source}: {row.reason}")
    if row.state is State.ENGINE_MISSING and isinstance(row.spec, BackendSpec):
        fix = row.spec.install_hint or install(*(n.split("|")[0] + s for n, s in row.spec.engine_requires.items()))
        return Finding(check=check, state=Health.FAULT, found=f"{row.source}: {row.reason}", fix=fix)
    if row.state is State.CLASH:
        fix = install(row.source.distribution).replace(" install ", " uninstall ")
        return Finding(check=check, state=Health.FAULT, found=f"{row.source}: {row.reason}", fix=fix)
    if row.state is State.WRONG_INTERFACE:
        fix = install("--upgrade", row.source.distribution, "rlsdk")
        return Finding(check=check, state=Health.FAULT, found=f"{row.source}: {row.reason}", fix=fix)
    return Finding(check=check, state=Health.FAULT, found=f"{row.source}: {row.reason}", fix=_reinstall(row))


def _only_lacks_an_extra(row: Row) -> bool:
    """Whether a component only lacks an optional package, such as that of a tracker."""
    return row.state is State.ENGINE_MISSING and not isinstance(row.spec, BackendSpec)


def _reinstall(row: Row) -> str:
    """Command that reinstalls a broken plugin and its engine's requirements."""
    if row.isolation is not None:
        return f"rlsdk plugins install {row.source.distribution} --isolated"
    requires = row.spec.engine_requires if isinstance(row.spec, BackendSpec) else {}
    engines = [f"{_installed(names)}{specifier}" for names, specifier in requires.items()]
    return install("--force-reinstall", row.source.distribution, *engines)


def _installed(names: str) -> str:
    """The installed distribution, or the first alternative."""
    for name in names.split("|"):
        try:
            importlib.metadata.version(name.strip())
        except importlib.metadata.PackageNotFoundError:
            continue
        return name.strip()
    return names.split("|")[0].strip()


def _spec(row: Row) -> BackendSpec:
    if not isinstance(row.spec, BackendSpec):
        raise TypeError(f"{row.name!r} is not a backend")
    return row.spec


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "", name).lower()
