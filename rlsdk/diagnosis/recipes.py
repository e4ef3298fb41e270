"""What an engine needs on a kind of device besides what its plugin's distribution asks for: the plugin's recipe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

RECIPE = "install.toml"
"""File in a plugin's package; a table for each kind of device."""


def recipe_of(module: str, device: str) -> Mapping[str, Any]:
    """The recipe of a plugin; empty: it has none for this device.

    Args:
        module: any module of the plugin; its package is found, not imported.
        device: `cpu` or `cuda`.
    """
    spec = importlib.util.find_spec(module.partition(":")[0].split(".")[0])
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    for file in (Path(folder) / RECIPE for folder in folders):
        if file.is_file():
            found: Mapping[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get(device, {})
            return found
    return {}


def unmet(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Requirements of a recipe that this environment does not meet, each with what is there instead."""
    for text in recipe.get("requires", ()):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield text, "not installed"
            continue
        # `2.13.0` asks for the build `2.13.0+cpu`, too.
        if not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            yield text, f"version {version}"
