"""`rlsdk plugins install` and `remove`: into this environment, or into one of the plugin's own.

An own environment is made under a name that nothing knows, must show in its own interpreter that the plugin works, and
is then recorded in one step. Whatever ends this program before that leaves a folder that nothing uses and the next
install clears away.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import secrets
import shutil
import sys
import tempfile
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

import rlsdk
from rlsdk.cli.installer import Installer, Wanted, applicable, find_uv, installer_for, make_environment, run
from rlsdk.cluster.ray_watchdog import MARK, RayWatchdog
from rlsdk.diagnosis.examine import count_gpus
from rlsdk.interfaces import ConfigError, PluginError, PluginLoadError, PluginNotFoundError
from rlsdk.kit.atomic import atomic_write_json
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

RECIPE = "install.toml"
"""In a plugin's package: what its environment needs besides what the distribution asks for, by device."""
SHARED = ("ray", "torch", "transformers", "numpy")
"""What an install into this environment may not change: the engines that are here were tested with it."""
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
    """What `rlsdk plugins install` was asked for besides the name."""

    editable: bool = False
    more: Sequence[str] = ()
    """Further requirements."""
    core: str | None = None
    """Where rlsdk itself comes from; None: from where this one came."""
    device: str = "auto"
    python: Path | None = None
    environment: Path | None = None
    """An environment that is there already: nothing is installed."""
    allow_direct: bool = False
    """Requirements may be URLs."""


def install(name: str, choices: Choices, *, isolated: bool) -> None:
    """Installs a plugin and prints what came of it.

    Raises:
        PluginError: it could not be installed, or does not work; what was there before is as it was.
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
    """Makes an environment for one plugin, tests it, records it; an older one of the same plugin is replaced."""
    start = time.monotonic()
    requirement = _requirement(name, editable=choices.editable)
    distribution = distribution_of(requirement)
    with _only_one(distribution):
        _clear_leftovers(distribution)
        folder = _environments() / f"{distribution}-{secrets.token_hex(4)}"
        with _gone_unless_finished(folder):
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
            shutil.rmtree(folder, ignore_errors=True)
            raise
        # The older environment, and what installers wrote that went on for a while after their parent was killed.
        _clear_leftovers(distribution)
    return record


def adopt(name: str, environment: Path) -> IsolatedPlugin:
    """Records an environment that somebody else made and keeps: an image's, a cluster's, a developer's."""
    start = time.monotonic()
    python = environment.expanduser().absolute() / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"--environment {str(environment)!r} is no virtual environment: {python} is not there")
    distribution = distribution_of(_requirement(name, editable=False))
    with _only_one(distribution):
        found = self_test(python, distribution)
        record = _record(distribution, python.parent.parent, found, requirements=(), owned=False)
        record = replace(record, seconds=round(time.monotonic() - start, 1))
        atomic_write_json(record_path(distribution), record.to_plain())
    return record


def remove(name: str) -> None:
    """Takes a plugin away: its own environment with its record, or the distribution out of this environment.

    Raises:
        PluginNotFoundError: there is neither.
        PluginError: a process still runs in its environment.
    """
    distribution = distribution_of(_requirement(name, editable=False))
    path = record_path(distribution)
    if path.exists():
        with _only_one(distribution):
            previous = _previous(distribution)
            if previous is not None and previous.owned and (users := users_of(Path(previous.environment))):
                raise PluginError(
                    f"{previous.environment} is in use by process {', '.join(map(str, users))}; end it, then run "
                    f"`rlsdk plugins remove {name}` again"
                )
            path.unlink()  # First: from here on nobody starts anything there.
            if previous is not None and previous.owned:
                shutil.rmtree(previous.environment, ignore_errors=True)
            _clear_leftovers(distribution)
        whole = previous is not None and previous.owned
        print(f"removed {distribution} and its environment" if whole else f"forgot {distribution}")
        return
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginNotFoundError(
            f"plugin {name!r} ({distribution}) is neither in this environment nor in one of its own; see "
            "`rlsdk plugins list`"
        ) from error
    installer_for(Path(sys.executable)).uninstall([distribution])
    print(f"removed {distribution} from this environment; what it brought along stays")


def self_test(python: Path, distribution: str) -> dict[str, Any]:
    """Lets a plugin show in its own interpreter that it can be found, imported and described.

    Raises:
        PluginError: it cannot; says what that interpreter said.
    """
    unfit = "the environment must have this rlsdk, and the same Python and Ray"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        # No record of ours may speak for it there.
        command = [str(python), "-P", "-m", "rlsdk.cli.selftest", distribution, str(answer)]
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
    """Processes of this node that run with an environment's interpreter."""
    import psutil

    prefix, found = f"{environment}{os.sep}", []
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(prefix) for part in (process.info["cmdline"] or ())[:1]):
            found.append(process.pid)
    return found


def distribution_of(requirement: str) -> str:
    """Name of the distribution that a requirement, wheel or folder brings, as indexes compare names."""
    place = requirement.removeprefix("-e ")
    if place.endswith(".whl"):
        try:
            return str(parse_wheel_filename(Path(place).name)[0])
        except InvalidWheelFilename as error:
            raise ConfigError(f"{place!r} is not the name of a wheel: {error}") from error
    if (project := Path(place) / "pyproject.toml").is_file():
        try:
            return canonicalize_name(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"])
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{project} cannot be read, or names no project: {error!r}") from error
    try:
        return canonicalize_name(Requirement(place).name)
    except InvalidRequirement as error:
        raise ConfigError(
            f"{requirement!r} is no plugin: expected a backend's name, a distribution such as 'rlsdk-acme>=1.2', a "
            "wheel, or a folder with a pyproject.toml"
        ) from error


def check_requirement(text: str, *, allow_direct: bool) -> None:
    """Lets a name with versions through, and a wheel or folder that is here: what an installer would take besides is
    refused, since it can run code from anywhere.

    Raises:
        ConfigError: an option, a URL, or nothing that an installer knows.
    """
    place = text.removeprefix("-e ").strip()
    if not place or place.startswith("-"):
        raise ConfigError(
            f"{text!r}: options of the installer are not taken; expected a name such as 'rlsdk-acme>=1.2'"
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
            f"{text!r}: what stands at a URL runs here as you. Give a name with versions, or download it, look at it "
            "and give its path; --allow-direct takes the URL all the same"
        )


def _requirement(name: str, *, editable: bool) -> str:
    """What the installer is given for a name: a place stays one, a first-party backend becomes its distribution."""
    if "://" in name:
        return name
    if name.endswith(".whl") or (Path(name) / "pyproject.toml").is_file():
        return f"-e {Path(name).absolute()}" if editable else str(Path(name).absolute())
    if beside := _beside(name):
        return f"-e {beside}"
    if editable:
        raise ConfigError(f"--editable: {name!r} is no folder")
    return next((names[name] for names in FIRST_PARTY.values() if name in names), name)


def _beside(name: str) -> Path | None:
    """The folder of a plugin in the checkout that this rlsdk runs from; None for one that was installed whole."""
    folder = Path(rlsdk.__file__).parents[1] / "plugins" / name.removeprefix("rlsdk-")
    return folder if name.replace("-", "").isalnum() and (folder / "pyproject.toml").is_file() else None


def core_requirement() -> str:
    """Where this rlsdk came from: a checkout, a folder, a wheel, or an index.

    Raises:
        ConfigError: that place is not there any more.
    """
    distribution = importlib.metadata.distribution("rlsdk")
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    place = str(direct.get("url", "")).removeprefix("file://")
    if not place:
        return f"rlsdk=={rlsdk.__version__}"
    if not os.path.exists(place):
        raise ConfigError(f"rlsdk was installed from {place!r}, which is not there; say where it is: --core WHEEL")
    return f"-e {place}" if direct.get("dir_info", {}).get("editable") else place


def _fill(installer: Installer, requirement: str, choices: Choices) -> None:
    """Installs the plugin alone, reads its recipe, then installs all that it needs."""
    installer.install_alone(requirement)
    (found,) = json.loads(run([str(installer.python), "-P", "-c", _PROBE])) or [None]
    if found is None:
        raise PluginError(f"{requirement!r} is no plugin of rlsdk: it has no entry point in the group 'rlsdk'")
    device = choices.device if choices.device != "auto" else "cuda" if count_gpus() else "cpu"
    recipe: Mapping[str, Any] = tomllib.loads(found["recipe"]).get(device, {})
    installer.install(
        Wanted(
            plugin=requirement,
            requirements=[choices.core or core_requirement(), *recipe.get("requires", ()), *choices.more],
            # rlsdk itself is brought by name.
            asked=[text for text in applicable(found["requires"]) if Requirement(text).name != "rlsdk"],
            overrides=recipe.get("overrides", ()),
            constraints=[f"ray=={importlib.metadata.version('ray')}"],
            torch_backend=recipe.get("torch_backend", "auto"),
        )
    )


def _install_here(name: str, choices: Choices) -> None:
    """Into this environment, where it may change nothing that other engines rely on."""
    requirement = _requirement(name, editable=choices.editable)
    distribution = distribution_of(requirement)
    pinned = {shared: importlib.metadata.version(shared) for shared in SHARED}
    # A local version, such as torch's +cpu, says which build it is: not a wish that an index could serve.
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
            f"{error}\nThis environment keeps {kept}. A plugin that needs others can have an environment of its own: "
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
    """The record that stands; None where there is none that can be read."""
    try:
        return read_record(record_path(distribution))
    except (OSError, ValueError, TypeError):
        return None


def _environments() -> Path:
    return home() / "environments"


@contextmanager
def _only_one(distribution: str) -> Iterator[None]:
    """Keeps two programs from working on one plugin's environment."""
    _environments().mkdir(parents=True, exist_ok=True)
    with (_environments() / f".{distribution}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PluginError(f"another process is installing or removing {distribution}; wait for it") from error
        yield


@contextmanager
def _gone_unless_finished(folder: Path) -> Iterator[None]:
    """Ends installers that were started inside, and removes what they wrote, unless the end is reached: also when this
    program is killed, by its own process that watches it."""
    watchdog = RayWatchdog(str(folder))
    os.environ[MARK] = str(folder)
    try:
        yield
    except BaseException:
        watchdog.end(_CLEAR_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        watchdog.release(_CLEAR_TIMEOUT_S)
    finally:
        del os.environ[MARK]


def _clear_leftovers(distribution: str) -> None:
    """Takes away environments of this plugin that no record names, and nobody uses."""
    previous = _previous(distribution)
    kept = Path(previous.environment) if previous else None
    for folder in _environments().glob(f"{distribution}-????????"):
        if folder != kept and not users_of(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _num_bytes(folder: Path) -> int:
    """Of the files of a folder, each counted once."""
    return sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)
