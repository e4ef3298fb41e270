"""Plugins in an environment of their own, described by a record that was written when the environment was made.

A record is a small JSON file in `RLSDK_HOME`. It is written last, atomically, after the plugin has passed a test in its
own interpreter: an environment without a record is incomplete and never used.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlsdk.interfaces import BackendKind, BackendSpec
from rlsdk.registry.checks import backend_nonsense, interface_misfit
from rlsdk.registry.load import broken
from rlsdk.registry.portable import plain_spec, spec_from_plain
from rlsdk.registry.row import Isolation, Row, Source, State
from rlsdk.system.files import read_regular
from rlsdk.system.printable import described
from rlsdk.version import __version__

HOME = "RLSDK_HOME"
"""Environment variable: folder for rlsdk's data of a user. Must be the same path on every node."""
FORMAT = 1
"""Format version of records."""
MAX_RECORD_BYTES = 16 << 20
SAME = ("python", "ray", "rlsdk", "numpy")
"""Packages whose versions must match between environments: Ray communicates only with its own version, and pickles need
the same Python and numpy."""


@dataclass(frozen=True, kw_only=True)
class IsolatedPlugin:
    """One record: a plugin, its environment, and all that discovery, negotiation and configuration need of it."""

    distribution: str
    version: str
    environment: str
    """Folder of the virtual environment."""
    python: str
    """Path of its interpreter."""
    owned: bool
    """Whether it was made for this plugin, and is removed with it; otherwise it belongs to somebody else and is not
    changed."""
    requirements: tuple[str, ...]
    """The requirements that were installed."""
    versions: Mapping[str, str]
    """Versions of Python (as `python`) and of the relevant distributions in it."""
    rows: tuple[Mapping[str, Any], ...]
    """What the plugin registers, in the form of `plain_row`."""
    num_bytes: int = 0
    """Size of the environment's files."""
    seconds: float = 0.0
    """Seconds that it took to make it."""
    format: int = field(default=FORMAT)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def home(environ: Mapping[str, str] | None = None) -> Path:
    """`RLSDK_HOME`, or `rlsdk` in the user's data folder."""
    environ = os.environ if environ is None else environ
    if environ.get(HOME):
        return Path(environ[HOME]).expanduser().absolute()
    data = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "rlsdk"


def record_path(distribution: str, environ: Mapping[str, str] | None = None) -> Path:
    """Path of the record of a distribution."""
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    return home(environ) / "plugins" / f"{name}.json"


def record_paths(environ: Mapping[str, str] | None = None) -> list[Path]:
    return sorted((home(environ) / "plugins").glob("[!.]*.json"))


def read_record(path: Path) -> IsolatedPlugin:
    """Reads a record.

    Raises:
        ValueError, TypeError, OSError: it is not a record of this format.
    """
    data = json.loads(read_regular(path, MAX_RECORD_BYTES))
    if not isinstance(data, dict):
        raise ValueError(f"a {type(data).__name__}, expected an object")
    if data.get("format") != FORMAT:
        raise ValueError(f"format {data.get('format')!r}: this rlsdk reads format {FORMAT}")
    data["rows"], data["requirements"] = tuple(data["rows"]), tuple(data["requirements"])
    return IsolatedPlugin(**data)


def plain_row(row: Row, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row as JSON values, with the description of its options."""
    spec = plain_spec(row.spec) if isinstance(row.spec, BackendSpec) else None
    return {
        "name": row.name,
        "kind": str(row.kind),
        "entry_point": row.source.entry_point,
        "state": str(row.state),
        "reason": row.reason,
        "spec": spec,
        "options": options,
    }


def isolated_rows(environ: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Rows of every recorded plugin. A problem of one plugin affects only its own rows."""
    for path in record_paths(environ):
        try:
            record = read_record(path)
            rows = [_row(record, data) for data in record.rows]
        except Exception as error:
            why = f"its record {path} cannot be read ({described(error)}); {reinstall(path.stem)}"
            yield broken(Source(distribution=path.stem), why, error)
            continue
        yield from rows


def reinstall(distribution: str) -> str:
    """The command that fixes most problems of an environment: reinstalling."""
    return f"run `rlsdk plugins install {distribution} --isolated`"


def versions_here() -> dict[str, str]:
    """Versions of the packages in `SAME` in this environment."""
    names = {"ray": "", "rlsdk": __version__, "numpy": ""}
    found = {name: known or importlib.metadata.version(name) for name, known in names.items()}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def version_misfit(theirs: Mapping[str, str | None], ours: Mapping[str, str]) -> str:
    """The versions that must match but differ, as text; empty if workers of that environment can be used."""
    differing = [name for name in SAME if _significant(name, theirs.get(name)) != _significant(name, ours[name])]
    has = ", ".join(f"{name} {theirs.get(name) or 'missing'}" for name in differing)
    needs = ", ".join(f"{name} {ours[name]}" for name in differing)
    return f"its environment has {has}, this one {needs}" if differing else ""


def _significant(name: str, version: str | None) -> str | None:
    """The part of a version that must match: for numpy, whose pickles are compatible within a major version, only
    that."""
    return version.partition(".")[0] if name == "numpy" and version else version


def _row(record: IsolatedPlugin, data: Mapping[str, Any]) -> Row:
    source = Source(distribution=record.distribution, version=record.version, entry_point=data["entry_point"])
    if data["spec"] is None:
        reason = f"only engines can live in an environment of their own ({record.environment}); install it here as well"
        return Row(name=data["name"], kind=data["kind"], source=source, state=State.ELSEWHERE, reason=reason)
    spec = spec_from_plain(data["spec"])
    state, reason = State(data["state"]), data["reason"]
    if nonsense := backend_nonsense(spec):
        state, reason = State.BROKEN, nonsense
    elif misfit := interface_misfit(spec):
        state, reason = State.WRONG_INTERFACE, misfit
    elif unfit := _unfit(record):
        state, reason = State.ELSEWHERE, f"{unfit}; {reinstall(record.distribution)}"
    elif state.usable:
        where = f"environment {record.environment}"
        reason = f"{reason}; {where}" if reason else where
    return Row(
        name=spec.name,
        kind=BackendKind(spec.kind),
        source=source,
        state=state,
        reason=reason,
        spec=spec,
        isolation=Isolation(
            environment=record.environment, python=record.python, versions=record.versions, options=data["options"]
        ),
    )


def _unfit(record: IsolatedPlugin) -> str:
    """Reason why workers cannot be started in it; empty if they can, as far as this node can tell."""
    if not os.access(record.python, os.X_OK):
        return f"its interpreter {record.python} is not there"
    return version_misfit(record.versions, versions_here())
