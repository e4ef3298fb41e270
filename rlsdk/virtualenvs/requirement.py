"""What a plugin may be installed from: a name with versions, a wheel, a folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tomllib
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from rlsdk import version
from rlsdk.interfaces import ConfigError
from rlsdk.registry import FIRST_PARTY
from rlsdk.system.files import read_regular_text


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


def requirement_for(name: str, *, editable: bool) -> str:
    """Returns the requirement for the installer: keeps paths and URLs, and maps a name of a first-party plugin to its
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
    folder = Path(version.__file__).parents[1] / "plugins" / name.removeprefix("rlsdk-").replace("-", "_")
    return folder if folder.name.replace("_", "").isalnum() and (folder / "pyproject.toml").is_file() else None


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
