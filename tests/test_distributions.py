"""What an index shows of the core and of every plugin: author, licence, classifiers, and a page whose links lead
somewhere. Read from pyproject.toml, of which the metadata of a wheel is made; nothing is built."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT, *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))]
RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]+\)")


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def index_readme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/index_readme.py; its base class is of the build backend, which no test environment has."""
    backend = ModuleType("hatchling.metadata.plugin.interface")
    backend.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = importlib.util.spec_from_file_location("index_readme", ROOT / "tools" / "index_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_metadata_says_who_what_and_for_which_python(folder: Path) -> None:
    found = project(folder)
    assert found["authors"]
    assert len(found["keywords"]) >= 4
    assert found["license"] == "Apache-2.0"
    assert [name for name in found["license-files"] if not (folder / name).is_file()] == []
    first, last = map(int, re.findall(r"3\.(\d+)", found["requires-python"]))
    promised = {f"Programming Language :: Python :: 3.{minor}" for minor in range(first, last)}
    assert {name for name in found["classifiers"] if re.search(r":: 3\.\d", name)} == promised
    assert found["requires-python"] == project(ROOT)["requires-python"]


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_a_plugins_page_has_no_link_into_the_repository(folder: Path) -> None:
    assert project(folder)["readme"] == "README.md"
    assert RELATIVE.findall((folder / "README.md").read_text()) == []


@pytest.mark.parametrize("source", [None, "https://example.org/rlsdk"])
def test_the_cores_page_has_no_link_into_the_repository(source: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text()
    links = len(RELATIVE.findall(text))
    shown = index_readme(monkeypatch).for_index(text, source)
    assert links > 10
    assert RELATIVE.findall(shown) == []
    assert shown.count("(https://example.org/rlsdk/blob/main/") == (links if source else 0)
    assert len(re.findall(r"`\w+(?:/\w+)*\.md`", shown)) >= (0 if source else links)


def test_the_archive_of_the_core_names_files_that_exist() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    names = [*hatch["build"]["targets"]["sdist"]["only-include"], hatch["metadata"]["hooks"]["custom"]["path"]]
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert not {"plugins", "docs", "tests", "examples"} & set(names)
