"""Sections on rewards: names that differ, rows, and what failed samples get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import dump_config, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry


def load(text: str, tmp_path: Path, *flags: str) -> Any:
    (tmp_path / "c.yaml").write_text(text)
    return load_config([tmp_path / "c.yaml"], flags, Registry.discover())


def test_rows_and_labels_are_read_and_written(tmp_path: Path) -> None:
    text = "rewards: [{name: math, label: hard, rows: {source: [a, 1, 1.5, true, null]}}, {name: math}]"
    config = load(text, tmp_path)
    assert config.rewards[0].rows == {"source": ("a", 1, 1.5, True, None)}
    assert [reward.title for reward in config.rewards] == ["hard", "math"]
    assert load(dump_config(config), tmp_path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{name: math}, {name: math}]", r"rewards.1.label: None: expected a label of its own, because rewards.0 is"),
        ("[{name: math, label: mean}]", r"rewards.0.label: 'mean': expected letters, .* and none of \['accuracy'"),
        ("[{name: math, label: a/b}]", r"rewards.0.label: 'a/b': expected letters"),
        ("[{name: math, rows: {source: []}}]", r"rewards.0.rows.source: \[\]: expected at least one value"),
        ("[{name: math, row: {source: [a]}}]", r"did you mean 'rows'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"rewards: {text}", tmp_path)


def test_failed_samples_are_dropped_or_get_a_score(tmp_path: Path) -> None:
    assert load("", tmp_path).reward_limits.on_failure == "drop"
    assert load("", tmp_path, "--reward_limits.on_failure", "-1").reward_limits.on_failure == -1.0
    assert load("reward_limits: {on_failure: 0.5}", tmp_path).reward_limits.on_failure == 0.5
    assert load("", tmp_path, "--reward_limits.on_failure", "drop").reward_limits.on_failure == "drop"
    with pytest.raises(ConfigError, match=r"reward_limits.on_failure.*'keep'"):
        load("reward_limits: {on_failure: keep}", tmp_path)
