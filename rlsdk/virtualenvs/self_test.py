"""`python -m rlsdk.virtualenvs.self_test DISTRIBUTION FILE`: tests a plugin in its interpreter.

Imports every engine that the plugin registers, and writes a description of the plugin for other environments. The
result goes to a file, because engines may print while they are imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlsdk.interfaces import BackendSpec, PluginError, PluginLoadError, PluginNotFoundError
from rlsdk.registry import Registry, Row, installed_version, plain_row, versions_here

ENGINES = ("torch", "transformers")
"""Libraries that most engines need, whose versions are reported besides those that the plugin names."""


def describe(distribution: str) -> dict[str, Any]:
    """Returns the version, the versions of related packages, and the registered rows of an installed plugin.

    Raises:
        PluginError: it is not installed, a backend or component is not usable, or an engine cannot be imported.
    """
    from rlsdk.config.introspection.portable import plain_options

    registry = Registry.discover()
    wanted = distribution.replace("_", "-").lower()
    rows = [row for row in registry.rows() if row.source.distribution.replace("_", "-").lower() == wanted]
    if not rows:
        raise PluginNotFoundError(f"{distribution!r} registers nothing: it is not installed, or not a plugin of rlsdk")
    if unusable := [f"{row.kind} {row.name!r}: {row.state}: {row.reason}" for row in rows if not row.state.usable]:
        raise PluginError("; ".join(unusable))
    plain = []
    for row in rows:
        options = None
        if isinstance(row.spec, BackendSpec):
            _import_engine(row.spec)
            registry.load_engine(row.spec)
            own = registry.load_options(row.spec)
            options = None if own is None else plain_options(own)
        plain.append(plain_row(row, options))
    return {"version": rows[0].source.version, "versions": _versions(rows), "rows": plain}


def _import_engine(spec: BackendSpec) -> None:
    """Imports the libraries of the plugin's engine, because its own module may import them lazily.

    Raises:
        PluginLoadError: an import fails; the message quotes its error.
    """
    for names in spec.engine_requires:
        for name in (one.strip() for one in names.split("|")):
            if installed_version(name) is None:
                continue
            for module in (importlib.metadata.distribution(name).read_text("top_level.txt") or "").split():
                if not name.replace("-", "_").startswith(module):
                    continue  # torch also installs tools that engines do not use
                try:
                    importlib.import_module(module)
                except (Exception, SystemExit) as error:
                    raise PluginLoadError(
                        f"{spec.kind} {spec.name!r}: {module!r} of {name} could not be imported: "
                        f"{type(error).__name__}: {error}"
                    ) from error


def _versions(rows: Iterable[Row]) -> dict[str, str]:
    """Returns the versions of packages that both sides must share, and of the engines, under the requested names."""
    named = [name for row in rows if isinstance(row.spec, BackendSpec) for name in row.spec.engine_requires]
    found = {name: installed_version(name) for name in (*ENGINES, *named)}
    return versions_here() | {name: version for name, version in found.items() if version is not None}


def main() -> None:
    distribution, answer = sys.argv[1:]
    try:
        found = describe(distribution)
    except (PluginError, importlib.metadata.PackageNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
