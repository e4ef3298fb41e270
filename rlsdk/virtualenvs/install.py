"""`rlsdk plugins install` and `remove`: a plugin in this environment, or in its own.

A plugin's own environment is created in a new folder with a random name. A self-test in its interpreter must show that
the plugin works; then one atomic write records it. If this program ends before that, nothing uses the folder, and the
next install removes it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import secrets
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from rlsdk import version
from rlsdk.cluster.ray_cluster.watchdog import MARK, RayWatchdog
from rlsdk.diagnosis.examine import count_gpus
from rlsdk.interfaces import ConfigError, PluginError, PluginLoadError, PluginNotFoundError
from rlsdk.registry import (
    FIRST_PARTY,
    HOME,
    IsolatedPlugin,
    home,
    read_record,
    record_path,
    version_misfit,
    versions_here,
)
from rlsdk.system.atomic import atomic_write_json
from rlsdk.system.files import read_regular_text, remove_tree
from rlsdk.system.temporary import held_folder
from rlsdk.virtualenvs.installer import Installer, Wanted, applicable, find_uv, installer_for, make_environment, run

RECIPE = "install.toml"
"""File in a plugin's package: what its environment needs besides the distribution's requirements, by device."""
SHARED = ("ray", "torch", "transformers", "numpy")
"""Packages that an install into this environment must not change: its engines were tested with these versions."""
_CLEAR_TIMEOUT_S = 60.0
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib
found = []
for distribution in importlib.metadata.distributions():
    points = [p for p in distribution.entry_points if p.group == "rlsdk"]
    if not points or distribution.metadata["Name"] == "rlsdk":
        continue
    spec = importlib.util.find_spec(points[0].value.split(":")[0].split(".")[0])
    folders = spec.submodule_search_locations if spec else None
    files = [pathlib.Path(folder, "install.toml") for folder in folders or ()]
    recipe = next((file.read_text() for file in files if file.is_file()), "")
    found.append({"name": distribution.metadata["Name"], "requires": distribution.requires or [], "recipe": recipe})
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Options of `rlsdk plugins install`."""

    editable: bool = False
    more: Sequence[str] = ()
    """Additional requirements."""
    core: str | None = None
    """Where to install rlsdk itself from; None: the source of this installation."""
    device: str = "auto"
    python: Path | None = None
    environment: Path | None = None
    """An existing environment, into which nothing is installed."""
    allow_direct: bool = False
    """Allow requirements that are URLs."""


def install(name: str, choices: Choices, *, isolated: bool) -> None:
    """Installs a plugin and prints the result.

    Raises:
        ConfigError: a requirement is invalid or not allowed.
        PluginError: it cannot be installed, or does not work; an earlier isolated installation is unchanged.
    """
    for requirement in (name, *choices.more, *([choices.core] if choices.core else ())):
        check_requirement(requirement, allow_direct=choices.allow_direct)
    if choices.environment is not None:
        record = adopt(name, choices.environment)
    elif isolated:
        record = install_isolated(name, choices)
    else:
        _install_here(name, choices)
        return
    size = f", {record.num_bytes / 1e9:.1f} GB" if record.num_bytes else ""
    print(f"{record.distribution} {record.version} works in {record.environment} ({record.seconds:.0f} s{size})")
    for row in record.rows:
        print(f"  {row['kind']} backend {row['name']!r}: {row['state']}; see `rlsdk plugins info {row['name']}`")


def install_isolated(name: str, choices: Choices) -> IsolatedPlugin:
    """Makes an environment for one plugin, tests it and records it; replaces an older one of the same plugin."""
    start = time.monotonic()
    requirement = _requirement(name, editable=choices.editable)
    distribution = distribution_of(requirement)
    with _lock_plugin(distribution):
        _clear_leftovers(distribution)
        folder = _environments() / f"{distribution}-{secrets.token_hex(4)}"
        with _remove_on_failure(folder):
            installer = make_environment(folder, choices.python or Path(sys.executable))
            _fill(installer, requirement, choices)
            found = self_test(installer.python, distribution)
            record = replace(
                _record(distribution, folder, found, requirements=(requirement, *choices.more), owned=True),
                num_bytes=_num_bytes(folder),
                seconds=round(time.monotonic() - start, 1),
            )
        try:
            atomic_write_json(record_path(distribution), record.to_plain())
        except BaseException:
            remove_tree(_environments(), folder)
            raise
        # The older environment, and files of installers that kept running after their parent was killed.
        _clear_leftovers(distribution)
    return record


def adopt(name: str, environment: Path) -> IsolatedPlugin:
    """Records an environment that others made and maintain: of an image, a cluster, or a developer."""
    start = time.monotonic()
    python = environment.expanduser().absolute() / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"--environment {str(environment)!r} is not a virtual environment: {python} does not exist")
    distribution = distribution_of(_requirement(name, editable=False))
    with _lock_plugin(distribution):
        found = self_test(python, distribution)
        record = _record(distribution, python.parent.parent, found, requirements=(), owned=False)
        record = replace(record, seconds=round(time.monotonic() - start, 1))
        atomic_write_json(record_path(distribution), record.to_plain())
    return record


def remove(name: str) -> None:
    """Removes a plugin: its own environment with its record, or the distribution from this environment.

    Raises:
        PluginNotFoundError: there is neither.
        PluginError: a process still runs in its environment.
    """
    distribution = distribution_of(_requirement(name, editable=False))
    path = record_path(distribution)
    if path.exists():
        with _lock_plugin(distribution):
            previous = _previous(distribution)
            own = _own_environment(previous)
            if own is not None and (users := users_of(own)):
                raise PluginError(
                    f"{own} is in use by process {', '.join(map(str, users))}; end it, then run "
                    f"`rlsdk plugins remove {name}` again"
                )
            path.unlink()  # first, so that no new process starts in the environment
            if own is not None:
                remove_tree(_environments(), own)
            _clear_leftovers(distribution)
        if own is not None:
            left = f"; {own} could not be removed whole" if own.exists() else ""
            print(f"removed {distribution} and its environment{left}")
        elif previous is not None and previous.owned:
            print(f"forgot {distribution}; {previous.environment!r} stays: it is no folder in {_environments()}")
        else:
            print(f"forgot {distribution}")
        return
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginNotFoundError(
            f"plugin {name!r} ({distribution}) is neither in this environment nor in its own; see `rlsdk plugins list`"
        ) from error
    installer_for(Path(sys.executable)).uninstall([distribution])
    print(f"removed {distribution} from this environment; its requirements stay installed")


def self_test(python: Path, distribution: str) -> dict[str, Any]:
    """Tests in a plugin's own interpreter that it can be found, imported and described; returns the description.

    Raises:
        PluginError: the test fails; the message quotes the output of the interpreter.
    """
    unfit = "the environment must have this rlsdk, and the same Python and Ray"
    with held_folder("install") as folder:
        answer = Path(folder) / "answer.json"
        # An empty home: our records must not make the plugin visible there.
        command = [str(python), "-P", "-m", "rlsdk.virtualenvs.self_test", distribution, str(answer)]
        try:
            run(command, {HOME: folder, "RLSDK_PLUGINS": "", "RLSDK_DISABLE_PLUGINS": ""}, as_worker=True)
        except PluginError as error:
            said = f"plugin {distribution!r} does not work in its environment ({unfit}): {error}"
            raise PluginLoadError(said) from None
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if misfit := version_misfit(found["versions"], versions_here()):
        raise PluginLoadError(f"plugin {distribution!r} cannot serve from {python}: {misfit}; {unfit}")
    return found


def users_of(environment: Path) -> list[int]:
    """Returns the process ids on this node that run an environment's interpreter."""
    import psutil

    prefix, found = f"{environment}{os.sep}", []
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(prefix) for part in (process.info["cmdline"] or ())[:1]):
            found.append(process.pid)
    return found


def distribution_of(requirement: str) -> str:
    """Returns the normalized name of the distribution that a requirement, wheel or folder installs."""
    place = requirement.removeprefix("-e ")
    if place.endswith(".whl"):
        try:
            return str(parse_wheel_filename(Path(place).name)[0])
        except InvalidWheelFilename as error:
            raise ConfigError(f"{place!r} is not the name of a wheel: {error}") from error
    if (project := Path(place) / "pyproject.toml").is_file():
        try:
            name = tomllib.loads(read_regular_text(project))["project"]["name"]
            return str(canonicalize_name(name, validate=True))  # it becomes part of paths
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigError(f"{project} cannot be read, or has no project name: {error!r}") from error
    try:
        return canonicalize_name(Requirement(place).name)
    except InvalidRequirement as error:
        raise ConfigError(
            f"{requirement!r} is not a plugin: expected a backend's name, a distribution such as 'rlsdk-acme>=1.2', a "
            "wheel, or a folder with a pyproject.toml"
        ) from error


def check_requirement(text: str, *, allow_direct: bool) -> None:
    """Allows a name with versions, and a local wheel or folder.

    Refuses everything else that an installer would accept, because it can run code from anywhere.

    Raises:
        ConfigError: the text is an option, a URL, or not a requirement.
    """
    place = text.removeprefix("-e ").strip()
    if not place or place.startswith("-"):
        raise ConfigError(
            f"{text!r}: options of the installer are not allowed; expected a name such as 'rlsdk-acme>=1.2'"
        )
    if Path(place).exists() or (Path(place).is_absolute() and place.endswith(".whl")):
        return
    try:
        direct = Requirement(place).url is not None
    except InvalidRequirement:
        direct = "://" in place or "@" in place
        if not direct:
            distribution_of(place)
    if direct and not allow_direct:
        raise ConfigError(
            f"{text!r}: code from a URL would run with your rights. Give a name with versions, or download it, check "
            "it and give its path; --allow-direct accepts the URL"
        )


def _requirement(name: str, *, editable: bool) -> str:
    """Returns the requirement for the installer: keeps paths and URLs, and maps a first-party backend to its
    distribution."""
    if "://" in name:
        return name
    if name.endswith(".whl") or (Path(name) / "pyproject.toml").is_file():
        return f"-e {Path(name).absolute()}" if editable else str(Path(name).absolute())
    if folder := _checkout_folder(name):
        return f"-e {folder}"
    if editable:
        raise ConfigError(f"--editable: {name!r} is not a folder with a pyproject.toml")
    return next((names[name] for names in FIRST_PARTY.values() if name in names), name)


def _checkout_folder(name: str) -> Path | None:
    """Returns the folder of a plugin in the checkout that this rlsdk runs from; None if there is none."""
    folder = Path(version.__file__).parents[1] / "plugins" / name.removeprefix("rlsdk-")
    return folder if name.replace("-", "").isalnum() and (folder / "pyproject.toml").is_file() else None


def core_requirement() -> str:
    """Returns the requirement from which this rlsdk was installed: a checkout, a folder, a wheel, or a version.

    Raises:
        ConfigError: that path no longer exists.
    """
    distribution = importlib.metadata.distribution("rlsdk")
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    place = str(direct.get("url", "")).removeprefix("file://")
    if not place:
        return f"rlsdk=={version.__version__}"
    if not os.path.exists(place):
        raise ConfigError(f"rlsdk was installed from {place!r}, which no longer exists; give its path: --core WHEEL")
    return f"-e {place}" if direct.get("dir_info", {}).get("editable") else place


def _fill(installer: Installer, requirement: str, choices: Choices) -> None:
    """Installs the plugin without its requirements, reads its recipe, then installs everything that it needs."""
    installer.install_alone(requirement)
    (found,) = json.loads(run([str(installer.python), "-P", "-c", _PROBE])) or [None]
    if found is None:
        raise PluginError(f"{requirement!r} is not a plugin of rlsdk: it has no entry point in the group 'rlsdk'")
    device = choices.device if choices.device != "auto" else "cuda" if count_gpus() else "cpu"
    recipe: Mapping[str, Any] = tomllib.loads(found["recipe"]).get(device, {})
    installer.install(
        Wanted(
            plugin=requirement,
            requirements=[choices.core or core_requirement(), *recipe.get("requires", ()), *choices.more],
            # rlsdk itself is in `requirements`.
            asked=[text for text in applicable(found["requires"]) if Requirement(text).name != "rlsdk"],
            overrides=recipe.get("overrides", ()),
            constraints=[f"ray=={importlib.metadata.version('ray')}"],
            torch_backend=recipe.get("torch_backend", "auto"),
        )
    )


def _install_here(name: str, choices: Choices) -> None:
    """Installs a plugin into this environment, without changing packages that other engines rely on."""
    requirement = _requirement(name, editable=choices.editable)
    distribution = distribution_of(requirement)
    pinned = {shared: importlib.metadata.version(shared) for shared in SHARED}
    # A local version, such as torch's +cpu, names a build; an index may not have it.
    constraints = [f"{shared}=={version.partition('+')[0]}" for shared, version in pinned.items()]
    wanted = Wanted(plugin=requirement, requirements=choices.more, constraints=constraints)
    python = Path(sys.executable)
    if not find_uv() and find_spec("pip") is None:
        raise PluginError(
            f"there is neither uv on PATH nor pip in {sys.prefix}; run `{python} -m ensurepip`, or install uv"
        )
    try:
        installer_for(python).install(wanted)
    except PluginError as error:
        kept = ", ".join(f"{shared} {version}" for shared, version in pinned.items())
        raise PluginError(
            f"{error}\nThis environment keeps {kept}. A plugin that needs other versions can have its own environment: "
            f"run `rlsdk plugins install {name} --isolated`"
        ) from None
    found = self_test(python, distribution)
    print(f"{distribution} {found['version']} works in this environment; see `rlsdk plugins list`")


def _record(
    distribution: str, environment: Path, found: Mapping[str, Any], *, requirements: tuple[str, ...], owned: bool
) -> IsolatedPlugin:
    return IsolatedPlugin(
        distribution=distribution,
        version=found["version"],
        environment=str(environment),
        python=str(environment / "bin" / "python"),
        owned=owned,
        requirements=requirements,
        versions=found["versions"],
        rows=tuple(found["rows"]),
    )


def _previous(distribution: str) -> IsolatedPlugin | None:
    """Returns the current record; None if there is none, or it cannot be read."""
    try:
        return read_record(record_path(distribution))
    except (OSError, ValueError, TypeError):
        return None


def _own_environment(record: IsolatedPlugin | None) -> Path | None:
    """The environment that was made for a plugin; None if others made it. A record may have been edited: nothing but a
    folder directly in `_environments()` is ours."""
    if record is None or not record.owned:
        return None
    folder = Path(record.environment)
    stands_here = folder.parent == _environments() and folder.name not in ("", ".", "..")
    return folder if stands_here and folder.is_dir() and not folder.is_symlink() else None


def _environments() -> Path:
    return home() / "environments"


@contextmanager
def _lock_plugin(distribution: str) -> Iterator[None]:
    """Holds a lock on a plugin's environment. Raises `PluginError` if another process has it."""
    _environments().mkdir(parents=True, exist_ok=True)
    with (_environments() / f".{distribution}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PluginError(f"another process is installing or removing {distribution}; wait for it") from error
        yield


@contextmanager
def _remove_on_failure(folder: Path) -> Iterator[None]:
    """On failure, ends installers that were started inside, and removes their files.

    A watchdog process does the same if this program is killed.
    """
    watchdog = RayWatchdog(str(folder))
    os.environ[MARK] = str(folder)
    try:
        yield
    except BaseException:
        watchdog.end(_CLEAR_TIMEOUT_S)
        remove_tree(_environments(), folder)
        raise
    else:
        watchdog.release(_CLEAR_TIMEOUT_S)
    finally:
        del os.environ[MARK]


def _clear_leftovers(distribution: str) -> None:
    """Removes environments of this plugin that no record names and no process uses."""
    previous = _previous(distribution)
    kept = Path(previous.environment) if previous else None
    for folder in _environments().glob(f"{distribution}-????????"):
        if folder != kept and folder.is_dir() and not folder.is_symlink() and not users_of(folder):
            remove_tree(_environments(), folder)


def _num_bytes(folder: Path) -> int:
    """Returns the total size of the files in a folder."""
    return sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)
