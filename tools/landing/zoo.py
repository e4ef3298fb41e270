"""Which broken engines run: those that a change since the landing's parent can reach, and a seeded eighth of the rest.

A broken engine shows that a requirement sees a defect. That changes with the defect, the requirement and the labs: it
reaches what its module and the modules of its requirements import of those. What they stand on (the kit, the built-in
engines) changes it seldom; the eighth sees that, and `make zoo`. What none of them reaches puts suites together: one
broken engine for each module of requirements shows that all are still asked for.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .changes import Parent, blobs_at, blobs_now, changed, head_of, summary

SOURCES = {"rlsdk.testing": ".", "broken": "tests/testing"}
"""Package -> folder that its path begins in: what proves, and what it is proven on."""
WATCHED = ("rlsdk/testing", "tests/testing/broken", "tests/testing/broken_runs.py",
           "tests/testing/test_broken_rollout.py", "tests/testing/test_broken_train.py")  # fmt: skip
"""What the result of a broken engine depends on."""
EVERY_SUITE = ("rlsdk.testing.suites.suite", "rlsdk.testing.plugin")
"""Modules that every requirement is run by."""
SHARE = 8
"""One in so many runs without a cause."""


@dataclass(frozen=True)
class Broken:
    """A broken engine, however it is registered."""

    kind: str
    name: str
    requirements: frozenset[str]
    """Names of the requirements that it must fail."""
    module: str
    """Where its class is: `broken.rollout_sleep`."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The broken engines that run, and why not all do."""

    chosen: frozenset[Broken]
    why: str


def select(root: Path, engines: Collection[Broken], parent: Parent) -> Selection:
    """The broken engines that a landing on `parent` runs; the same ones for the same commit."""
    everything = frozenset(engines)
    if parent.commit is None:
        return Selection(chosen=everything, why=parent.why)
    files = changed(blobs_at(root, parent.commit, WATCHED), blobs_now(root, WATCHED))
    homes = requirement_modules(root)
    reach = {engine: reached(root, engine, homes) for engine in everything}
    commit = head_of(root)
    hit = {engine for engine in everything if reach[engine] & files}
    why = f"{len(hit)} reach what changed since {parent.short}{f' ({summary(files)})' if files else ''}"
    if unreached := files - frozenset().union(*reach.values()):
        each = one_each(everything, homes, commit)
        why += f", {len(each - hit)} more stand for the modules of requirements ({summary(unreached)})"
        hit |= each
    drawn = {engine for engine in everything - hit if is_drawn(commit, engine)}
    return Selection(chosen=frozenset(hit | drawn), why=f"{why}, {len(drawn)} are the eighth that {commit[:8]} draws")


def is_drawn(commit: str, engine: Broken) -> bool:
    """Whether it is in the eighth of a commit: another one for each, and none misses its turn for long."""
    return draw(commit, engine) % SHARE == 0


def draw(commit: str, engine: Broken) -> int:
    """Number by which a commit orders broken engines."""
    text = f"{commit} {engine.kind} {engine.name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def one_each(engines: Collection[Broken], homes: Mapping[str, str], commit: str) -> set[Broken]:
    """One broken engine for each kind of engine and module of requirements; another one for each commit."""
    found: dict[tuple[str, str], Broken] = {}
    for engine in sorted(engines, key=lambda engine: draw(commit, engine)):
        for name in sorted(engine.requirements):
            found.setdefault((engine.kind, homes.get(name.partition("[")[0], "")), engine)
    return set(found.values())


def requirement_modules(root: Path) -> dict[str, str]:
    """Requirement -> module that defines it."""
    files = sorted((root / "rlsdk" / "testing").rglob("*.py"))
    return {name: _module_of(root, file) for file in files for name in _requirements(_tree(file))}


def reached(root: Path, engine: Broken, homes: Mapping[str, str]) -> frozenset[str]:
    """Files on which the result of a broken engine depends, as far as imports say."""
    modules = [homes[name] for of in engine.requirements if (name := of.partition("[")[0]) in homes]
    return frozenset().union(*(closure(root, module) for module in {engine.module, *modules, *EVERY_SUITE}))


@cache
def closure(root: Path, module: str) -> frozenset[str]:
    """Files of a module and of all that it imports."""
    seen: set[Path] = set()
    left = [*_files(root, module)]
    while left:
        if (file := left.pop()) not in seen:
            seen.add(file)
            left += _imported(root, file)
    return frozenset(file.relative_to(root).as_posix() for file in seen)


@cache
def _imported(root: Path, file: Path) -> frozenset[Path]:
    """Files that a file imports; not what only type checkers read."""
    return frozenset(other for name in frozenset(_names(_tree(file))) for other in _files(root, name))


@cache
def _files(root: Path, module: str) -> Collection[Path]:
    """The file of a module, or of a name in one, and those of the packages that it lies in; none: it is not watched."""
    home = next((name for name in SOURCES if f"{module}.".startswith(f"{name}.")), None)
    if home is None:
        return ()
    parts, first = module.split("."), home.count(".") + 1
    places = [root.joinpath(SOURCES[home], *parts[:at]) for at in range(first, len(parts) + 1)]
    return [file for place in places for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]


def _names(node: ast.AST) -> Iterator[str]:
    """Modules that are imported, and names that could be modules."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _requirements(tree: ast.Module) -> Iterator[str]:
    """Names of the requirements of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "requirement":
            yield from (str(name.value) for name in node.args if isinstance(name, ast.Constant))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _module_of(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
