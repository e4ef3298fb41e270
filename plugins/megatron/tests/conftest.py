"""Models, and the results of all worlds: each world starts once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cases
import pytest
from worlds import Case, run_world

from rlsdk.testing.models import write_tiny_model

with warnings.catch_warnings():
    # Megatron warns at import of packages that are not there; pytest makes errors of warnings.
    warnings.simplefilter("ignore")
    import rlsdk_megatron.engine  # noqa: F401


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, str]:
    found = {
        "plain": write_tiny_model(folder / "plain", seed=1, layers=4),
    }
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def worlds(models: dict[str, str], folder: Path) -> Mapping[int, list[Case]]:
    for name in cases.FOLDERS:
        (folder / name).mkdir()
    return {2: cases.pair(models, folder), 4: cases.four(models, folder), 1: cases.alone(models, folder)}


class Results:
    """`results[world, name]`: what each rank found. A world runs when it is first asked for, after those whose
    checkpoints it reads."""

    def __init__(self, worlds: Mapping[int, list[Case]], folder: Path) -> None:
        self.worlds, self.folder = worlds, folder
        self.found: dict[int, dict[str, list[Any]]] = {}

    def __getitem__(self, key: tuple[int, str]) -> list[Any]:
        world, name = key
        return self._world(world)[name]

    def _world(self, world: int) -> dict[str, list[Any]]:
        if world != 2:
            self._world(2)
        if world not in self.found:
            self.found[world] = run_world(world, self.worlds[world], self.folder)
        return self.found[world]


@pytest.fixture(scope="session")
def results(worlds: Mapping[int, list[Case]], folder: Path) -> Results:
    return Results(worlds, folder)
