"""A configuration whose paths were made absolute: the same run from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.api.paths import absolute_source, with_absolute_paths
from rlsdk.config import dump_config, load_config
from rlsdk.registry import Registry


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the names below stand for."""
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name:odd.csv").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_and_folders_that_are_there_get_their_place_and_nothing_else_does(here: Path) -> None:
    flags = [
        "--model", "org/name", "--model.tokenizer", "org/other", "--data", "rows.jsonl",
        "--data.eval", "reasoning_gym:chain_sum",
        "--reward", "own.py:score", "--reward", "gsm8k", "--rewards.0.options", "{path: rows.jsonl, fn: 'a.py:b'}",
        "--trainer.callbacks", "['sub/own.py:stop', 'pkg.mod:stop']", "--algorithm.loss", "own.py:loss",
        "--data.prompt_template", "{prompt} as in own.py:score", "--reward_models", "[{path: org/name}]",
    ]  # fmt: skip
    config = with_absolute_paths(load_config([], flags, Registry.discover()))
    assert config.model.path == str(here / "org" / "name")
    assert config.model.tokenizer == "org/other"
    assert config.data.train == str(here / "rows.jsonl")
    assert config.data.eval == "reasoning_gym:chain_sum"
    assert [reward.name for reward in config.rewards] == [f"{here}/own.py:score", "gsm8k"]
    assert config.rewards[0].options == {"path": "rows.jsonl", "fn": "a.py:b"}  # the function's own business
    assert config.trainer.callbacks == (f"{here}/sub/own.py:stop", "pkg.mod:stop")
    assert config.algorithm.loss == f"{here}/own.py:loss"
    assert config.data.prompt_template == "{prompt} as in own.py:score"
    assert config.reward_models[0].path == str(here / "org" / "name")
    assert with_absolute_paths(config) == config


def test_a_configuration_without_paths_stays_as_it_is(here: Path) -> None:
    config = load_config([], ["--data", "openai/gsm8k:main"], Registry.discover())
    assert with_absolute_paths(config) is config
    assert "openai/gsm8k:main" in dump_config(config)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rows.jsonl", "{here}/rows.jsonl"),
        ("./rows.jsonl", "{here}/rows.jsonl"),
        ("json:rows.jsonl", "json:{here}/rows.jsonl"),
        ("org/name:train", "{here}/org/name:train"),
        ("folder:org/name:train", "folder:{here}/org/name:train"),
        ("org/name:odd.csv", "{here}/org/name:odd.csv"),
        ("missing.jsonl", "missing.jsonl"),
        ("reasoning_gym:rows.jsonl", "reasoning_gym:rows.jsonl"),
        ("", ""),
    ],
)
def test_data_sources_with_a_path_in_them(name: str, found: str, here: Path) -> None:
    assert absolute_source(name) == found.format(here=here)
