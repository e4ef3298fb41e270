"""Recipes: `--algorithm NAME` sets several fields, each of which can be overridden."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rlsdk.interfaces import ConfigError, nearest

FOLDER = Path(str(files("rlsdk.config") / "recipe_files"))


def recipe_names() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """The YAML file of a recipe.

    Raises:
        ConfigError: there is none of this name; names the nearest.
    """
    names = recipe_names()
    if name not in names:
        raise ConfigError(
            f"algorithm.recipe {name!r} does not exist{nearest(name, names)}; choose one of {names}, or set its parts: "
            "algorithm.advantage, algorithm.loss"
        )
    return FOLDER / f"{name}.yaml"


def recipe_text(name: str) -> str:
    """The recipe's file as written: YAML with a comment on top."""
    return recipe_file(name).read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """The first line of its comment."""
    first = recipe_text(name).splitlines()[0]
    return first.removeprefix("#").strip()
