"""Makes virtual environments and installs packages: with uv if it is available, else with venv and pip.

uv can replace requirements of packages (overrides). With pip this takes three steps. First install, without their
requirements, the plugin and each engine that requires a replaced package. Then install their requirements with the
replacements. Then uninstall packages that an override excludes but that were installed anyway.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlsdk.interfaces import PluginError
from rlsdk.system.import_path import SAFE_PATH
from rlsdk.system.temporary import held_folder

NEVER = "sys_platform == 'never'"
"""Marker of an override that excludes a package."""
_TORCH_INDEX = "https://download.pytorch.org/whl"
_TIMEOUT_S = 3600.0
_LAST_LINES = 15
_UV_NAMES = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
"""uv does not read pip's environment variables; we pass their values to uv too."""
_NO_PROJECT = ("--project", "/")
"""Keeps uv from the `uv.toml` and `pyproject.toml` of the current folder and those above, which may be another person's
and name an index. Unlike `--no-config`, it keeps the configuration of the user and of the machine."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Packages to install into an environment."""

    plugin: str
    """Name with versions, wheel or folder; `-e FOLDER` for an editable install of a source checkout."""
    requirements: Sequence[str] = ()
    """Further requirements, in the same forms."""
    asked: Sequence[str] = ()
    """Requirements of the plugin, if it is already installed without them."""
    overrides: Sequence[str] = ()
    """Requirements that replace those of packages; the marker `sys_platform == 'never'` excludes a package."""
    constraints: Sequence[str] = ()
    torch_backend: str | None = None
    """Build of torch: `cpu`, `cu128`, ..., `auto`."""


class Installer:
    """Installs into the environment of one interpreter."""

    def __init__(self, python: Path) -> None:
        self.python = python

    def install(self, wanted: Wanted) -> None:
        """Installs everything in one call, so that versions are resolved together.

        Raises:
            PluginError: versions conflict, or a package cannot be found; with the last lines of the installer's output.
        """
        raise NotImplementedError

    def install_alone(self, requirement: str) -> None:
        """Installs one package without its requirements."""
        raise NotImplementedError

    def uninstall(self, names: Sequence[str]) -> None:
        raise NotImplementedError


class Uv(Installer):
    """Installs with uv."""

    def __init__(self, python: Path, command: Sequence[str]) -> None:
        super().__init__(python)
        self._command = [*command, *_NO_PROJECT, "pip"]

    def install(self, wanted: Wanted) -> None:
        # Engines are large: to import one without byte-code takes half a minute.
        options = [] if "UV_COMPILE_BYTECODE" in os.environ else ["--compile-bytecode"]
        if wanted.torch_backend and "UV_TORCH_BACKEND" not in os.environ and _torch_index_answers():
            options.append(f"--torch-backend={wanted.torch_backend}")
        with _listed(wanted.overrides) as overrides, _listed(wanted.constraints) as constraints:
            options += ["--overrides", overrides, "--constraint", constraints]
            self._pip("install", *options, *_arguments([wanted.plugin, *wanted.requirements]))

    def install_alone(self, requirement: str) -> None:
        self._pip("install", "--no-deps", *_arguments([requirement]))

    def uninstall(self, names: Sequence[str]) -> None:
        self._pip("uninstall", *names)

    def _pip(self, verb: str, *arguments: str) -> None:
        given = {uv: os.environ[pip] for uv, pip in _UV_NAMES.items() if pip in os.environ and uv not in os.environ}
        run([*self._command, verb, "--python", str(self.python), *arguments], given)


class Pip(Installer):
    """Installs with the environment's own pip."""

    def install(self, wanted: Wanted) -> None:
        overrides = {_name(text): text for text in wanted.overrides}
        if overrides:  # then the plugin is already installed, without its requirements
            kept = self._replaced([*wanted.asked, *wanted.requirements], overrides)
        else:
            kept = [*wanted.requirements, wanted.plugin]
        backend, options = wanted.torch_backend, list[str]()
        if backend not in (None, "auto") and "PIP_EXTRA_INDEX_URL" not in os.environ and _torch_index_answers():
            options = ["--extra-index-url", f"{_TORCH_INDEX}/{backend}"]
        with _listed(wanted.constraints) as constraints:
            options += ["--constraint", constraints]
            self._pip("install", *options, *_arguments([text for text in kept if NEVER not in text]))
        if out := [name for name, text in overrides.items() if NEVER in text]:
            self.uninstall(out)
        for text in overrides.values():
            if NEVER not in text:
                self.install_alone(text)

    def install_alone(self, requirement: str) -> None:
        self._pip("install", "--no-deps", *_arguments([requirement]))

    def uninstall(self, names: Sequence[str]) -> None:
        self._pip("uninstall", "--yes", *names)

    def _replaced(self, asked: Sequence[str], overrides: Mapping[str, str]) -> list[str]:
        """Returns the requirements with replacements.

        A package that requires a replaced one is installed without its requirements, and its requirements take its
        place in the list. Otherwise pip would download gigabytes that are then removed again.
        """
        known = [text for text in asked if not _is_place(text) and _name(text) not in overrides]
        options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
        report = json.loads(self._pip("install", *options, *known)) if known else {"install": ()}
        kept = list(asked)
        for found in report["install"]:
            metadata = found["metadata"]
            requires = applicable(metadata.get("requires_dist", ()), found.get("requested_extras", ()))
            if any(_name(text) in overrides for text in requires):
                self.install_alone(f"{metadata['name']}=={metadata['version']}")
                kept = [text for text in kept if _name(text) != canonicalize_name(metadata["name"])] + requires
        return [overrides.get(_name(text), text) for text in kept]

    def _pip(self, verb: str, *arguments: str) -> str:
        return run([str(self.python), "-m", "pip", "--disable-pip-version-check", verb, *arguments])


def make_environment(folder: Path, python: Path) -> Installer:
    """Makes a new, empty virtual environment; returns its installer."""
    if uv := find_uv():
        run([*uv, *_NO_PROJECT, "venv", "--python", str(python), str(folder)])
    else:
        run([str(python), "-m", "venv", str(folder)])
    return installer_for(folder / "bin" / "python")


def installer_for(python: Path) -> Installer:
    uv = find_uv()
    return Uv(python, uv) if uv else Pip(python)


def find_uv() -> list[str]:
    """Returns the command that runs uv; empty if it is not installed."""
    beside = Path(sys.executable).parent / "uv"
    if beside.exists():
        return [str(beside)]
    if path := shutil.which("uv"):
        return [path]
    return [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else []


def run(command: Sequence[str], more_environment: dict[str, str] | None = None, *, as_worker: bool = False) -> str:
    """Runs a command; returns its standard output.

    Args:
        command: program and arguments.
        more_environment: environment variables to set.
        as_worker: keep PYTHONPATH and PYTHONHOME of this process, as Ray does for workers.

    Raises:
        PluginError: it failed; with the last lines of its output.
    """
    # An installation must not depend on the import folders of this process.
    left_out = () if as_worker else ("PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {SAFE_PATH: "1", **(more_environment or {})}  # `-m pip` would import from the current folder
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"`{' '.join(command)}` could not be run: {error}") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
        raise PluginError(f"`{' '.join(command)}` failed ({done.returncode}):\n{last}")
    return done.stdout


def _arguments(requirements: Sequence[str]) -> list[str]:
    """Returns requirements as command-line arguments; `-e FOLDER` becomes two."""
    return [part for text in requirements for part in (text.split(" ", 1) if text.startswith("-e ") else [text])]


def _is_place(requirement: str) -> bool:
    return requirement.startswith("-e ") or requirement.endswith(".whl") or os.sep in requirement


def _name(requirement: str) -> str:
    return "" if _is_place(requirement) else canonicalize_name(Requirement(requirement).name)


def applicable(requirements: Sequence[str], extras: Sequence[str] = ()) -> list[str]:
    """Returns the requirements that apply on this platform, without an extra or with one of `extras`."""
    found = []
    for one in map(Requirement, requirements):
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            one.marker = None
            found.append(str(one))
    return found


@contextmanager
def _listed(lines: Sequence[str]) -> Iterator[str]:
    """Yields the path of a temporary file with these lines."""
    with held_folder("install") as folder:
        path = Path(folder) / "lines.txt"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        yield str(path)


def _torch_index_answers() -> bool:
    try:
        with urllib.request.urlopen(f"{_TORCH_INDEX}/cpu/torch/", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
