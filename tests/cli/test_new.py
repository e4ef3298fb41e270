"""`rlsdk plugins new`: whole files, no mark left, nothing overwritten. What they do is tested in `tests/isolated`."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from rlsdk.cli.plugin_tools.new import KINDS, new_plugin
from rlsdk.interfaces import ConfigError


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, False) for kind in KINDS), ("train", True)])
def test_every_kind_is_a_whole_distribution(
    kind: str, ranks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    new_plugin("fair-wind", kind, folder, ranks=ranks)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["entry-points"]) == (
        "rlsdk-fair-wind",
        {"rlsdk": {"fair-wind": "rlsdk_fair_wind.plugin"}},
    )
    assert {"README.md", ".gitignore", ".github", "src", "tests"} <= {path.name for path in folder.iterdir()}
    assert (folder / "src" / "rlsdk_fair_wind" / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    for file in (path for path in folder.rglob("*") if path.is_file()):
        text = file.read_text()
        assert re.findall(r"@[A-Z]+@", text) == [], file
        assert max(map(len, text.splitlines()), default=0) <= 120, file
        if file.suffix == ".py":
            ast.parse(text)
    assert f"cd {folder} && pip install" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("acme", "rolout", "--kind 'rolout' is not a kind; did you mean 'rollout'"),
        ("Acme Engine", "reward", "plugin name 'Acme Engine': expected lower-case letters"),
        ("class", "reward", "plugin name 'class': expected lower-case letters"),
        ("grpo", "algorithm", "plugin name 'grpo' is taken by the advantage of rlsdk"),
    ],
)
def test_what_cannot_be_a_plugin_is_refused(name: str, kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        new_plugin(name, kind, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_only_a_train_engine_has_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ranks with --kind 'reward': only a train engine has ranks"):
        new_plugin("acme", "reward", tmp_path / "made", ranks=True)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    with pytest.raises(ConfigError, match="already exists; give a new folder with --folder"):
        new_plugin("acme", "reward", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
