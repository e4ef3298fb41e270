"""`rlsdk plugins install` and `remove`: a plugin in this environment, or in its own.

A plugin's own environment is created in a new folder with a random name. A self-test in its interpreter must show that
the plugin works; then one atomic write records it. If this program ends before that, nothing uses the folder, and the
next install removes it.
"""

from __future__ import annotations

import importlib.metadata
import json
import secrets
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from rlsdk.diagnosis.examine import count_gpus
from rlsdk.interfaces import ConfigError, PluginError, PluginLoadError, PluginNotFoundError
from rlsdk.registry import (
    HOME,
    IsolatedPlugin,
    record_path,
    spoken,
    version_misfit,
    versions_here,
)
from rlsdk.system.atomic import atomic_write_json
from rlsdk.system.files import remove_tree
from rlsdk.system.temporary import held_folder
from rlsdk.virtualenvs.environments import (
    clear_leftovers,
    current_record,
    environments_folder,
    lock_plugin,
    num_bytes,
    own_environment,
    remove_on_failure,
    users_of,
)
from rlsdk.virtualenvs.installer import Installer, Wanted, applicable, find_uv, installer_for, make_environment, run
from rlsdk.virtualenvs.requirement import check_requirement, core_requirement, distribution_of, requirement_for

SHARED = ("ray", "torch", "transformers", "numpy")
"""Packages that an install into this environment must not change: its engines were tested with these versions."""
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
        print(f"  {spoken(row['kind'])} {row['name']!r}: {row['state']}; see `rlsdk plugins info {row['name']}`")


def install_isolated(name: str, choices: Choices) -> IsolatedPlugin:
    """Makes an environment for one plugin, tests it and records it; replaces an older one of the same plugin."""
    start = time.monotonic()
    requirement = requirement_for(name, editable=choices.editable)
    distribution = distribution_of(requirement)
    with lock_plugin(distribution):
        clear_leftovers(distribution)
        folder = environments_folder() / f"{distribution}-{secrets.token_hex(4)}"
        with remove_on_failure(folder):
            installer = make_environment(folder, choices.python or Path(sys.executable))
            _fill(installer, requirement, choices)
            found = self_test(installer.python, distribution)
            record = replace(
                _record(distribution, folder, found, requirements=(requirement, *choices.more), owned=True),
                num_bytes=num_bytes(folder),
                seconds=round(time.monotonic() - start, 1),
            )
        try:
            atomic_write_json(record_path(distribution), record.to_plain())
        except BaseException:
            remove_tree(environments_folder(), folder)
            raise
        # The older environment, and files of installers that kept running after their parent was killed.
        clear_leftovers(distribution)
    return record


def adopt(name: str, environment: Path) -> IsolatedPlugin:
    """Records an environment that others made and maintain: of an image, a cluster, or a developer."""
    start = time.monotonic()
    python = environment.expanduser().absolute() / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"--environment {str(environment)!r} is not a virtual environment: {python} does not exist")
    distribution = distribution_of(requirement_for(name, editable=False))
    with lock_plugin(distribution):
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
    distribution = distribution_of(requirement_for(name, editable=False))
    path = record_path(distribution)
    if path.exists():
        with lock_plugin(distribution):
            previous = current_record(distribution)
            own = own_environment(previous)
            if own is not None and (users := users_of(own)):
                raise PluginError(
                    f"{own} is in use by process {', '.join(map(str, users))}; end it, then run "
                    f"`rlsdk plugins remove {name}` again"
                )
            path.unlink()  # first, so that no new process starts in the environment
            if own is not None:
                remove_tree(environments_folder(), own)
            clear_leftovers(distribution)
        if own is not None:
            left = f"; {own} could not be removed whole" if own.exists() else ""
            print(f"removed {distribution} and its environment{left}")
        elif previous is not None and previous.owned:
            print(f"forgot {distribution}; {previous.environment!r} stays: it is no folder in {environments_folder()}")
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
    requirement = requirement_for(name, editable=choices.editable)
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
