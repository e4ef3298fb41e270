"""Makes virtual environments and puts packages into them: uv where it is present, else venv and pip.

uv can replace what a package asks for (overrides). pip cannot, so there the same is done in steps: the plugin, and each
engine that asks for what is replaced, without what they ask for; then their requirements with the replacements; then
what still came along against them is taken out again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlsdk.interfaces import PluginError

NEVER = "sys_platform == 'never'"
"""The marker of an override that leaves a package out."""
_TORCH_INDEX = "https://download.pytorch.org/whl"
_TIMEOUT_S = 3600.0
_LAST_LINES = 15
_UV_NAMES = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
"""uv does not read pip's environment; what is set for pip is meant for any installer."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What goes into an environment."""

    plugin: str
    """Name with versions, wheel or folder; `-e FOLDER` for a source checkout that stays where it is."""
    requirements: Sequence[str] = ()
    """What else, in the same forms."""
    asked: Sequence[str] = ()
    """What the plugin asks for, where it is installed alone already."""
    overrides: Sequence[str] = ()
    """Requirements that replace what packages ask for; marked `sys_platform == 'never'`: leave it out."""
    constraints: Sequence[str] = ()
    torch_backend: str | None = None
    """Which build of torch: `cpu`, `cu128`, ..., `auto`."""


class Installer:
    """Works on one interpreter's environment."""

    def __init__(self, python: Path) -> None:
        self.python = python

    def install(self, wanted: Wanted) -> None:
        """Brings everything at once, so that versions fit together.

        Raises:
            PluginError: they do not, or something cannot be had; with the installer's last lines.
        """
        raise NotImplementedError

    def install_alone(self, requirement: str) -> None:
        """One package, without what it asks for."""
        raise NotImplementedError

    def uninstall(self, names: Sequence[str]) -> None:
        raise NotImplementedError


class Uv(Installer):
    """By uv."""

    def __init__(self, python: Path, command: Sequence[str]) -> None:
        super().__init__(python)
        self._command = [*command, "pip"]

    def install(self, wanted: Wanted) -> None:
        # Engines are large: importing one without byte-code takes half a minute.
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
    """By the environment's own pip."""

    def install(self, wanted: Wanted) -> None:
        overrides = {_name(text): text for text in wanted.overrides}
        if overrides:  # Then the plugin is there, alone.
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
        """What is asked for, with the replacements. A package that asks for what is replaced is installed alone and
        stands as its own requirements: else it would bring gigabytes, only to have them taken out again."""
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
    """A new, empty virtual environment, and what installs into it."""
    if uv := find_uv():
        run([*uv, "venv", "--python", str(python), str(folder)])
    else:
        run([str(python), "-m", "venv", str(folder)])
    return installer_for(folder / "bin" / "python")


def installer_for(python: Path) -> Installer:
    uv = find_uv()
    return Uv(python, uv) if uv else Pip(python)


def find_uv() -> list[str]:
    """The command that runs uv; empty where it is not present."""
    beside = Path(sys.executable).parent / "uv"
    if beside.exists():
        return [str(beside)]
    if path := shutil.which("uv"):
        return [path]
    return [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else []


def run(command: Sequence[str], more_environment: dict[str, str] | None = None, *, as_worker: bool = False) -> str:
    """Runs a command; returns what it printed.

    Args:
        command: with its arguments.
        more_environment: variables to set.
        as_worker: with the folders that this process was given for its imports, as Ray starts workers.

    Raises:
        PluginError: it failed; with its last lines.
    """
    # What is installed must not depend on folders that were given to this process for its own imports.
    left_out = () if as_worker else ("PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= more_environment or {}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"`{' '.join(command)}` could not be run: {error}") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
        raise PluginError(f"`{' '.join(command)}` failed ({done.returncode}):\n{last}")
    return done.stdout


def _arguments(requirements: Sequence[str]) -> list[str]:
    """As command-line arguments: `-e FOLDER` is two."""
    return [part for text in requirements for part in (text.split(" ", 1) if text.startswith("-e ") else [text])]


def _is_place(requirement: str) -> bool:
    return requirement.startswith("-e ") or requirement.endswith(".whl") or os.sep in requirement


def _name(requirement: str) -> str:
    return "" if _is_place(requirement) else canonicalize_name(Requirement(requirement).name)


def applicable(requirements: Sequence[str], extras: Sequence[str] = ()) -> list[str]:
    """Those of this platform, and of no extra or of these."""
    found = []
    for one in map(Requirement, requirements):
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            one.marker = None
            found.append(str(one))
    return found


@contextmanager
def _listed(lines: Sequence[str]) -> Iterator[str]:
    """A file with these lines, for as long as the context lives."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        yield file.name


def _torch_index_answers() -> bool:
    try:
        with urllib.request.urlopen(f"{_TORCH_INDEX}/cpu/torch/", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
