"""Sections on rewards: names that differ, rows, and what failed samples get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import dump_config, load_config
from rlsdk.config.loading.trust import code_in
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


def test_a_service_is_named_by_its_url(tmp_path: Path) -> None:
    text = "rewards: [{name: 'http://h/score', label: far, remote: {token_env: TOKEN, headers_from_env: {X-Key: KEY}}}]"
    config = load(text, tmp_path)
    assert config.rewards[0].is_remote
    assert config.rewards[0].remote.headers_from_env == {"X-Key": "KEY"}
    assert load("", tmp_path, "--reward", "https://h/score").rewards[0].is_remote


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[{name: math, remote: {}}]",
            "rewards.0.remote: belongs to a reward that is named by a URL, or a judge; name is 'math'",
        ),
        ("[{name: 'http://h/s', options: {a: 1}}]", r"rewards.0.options: \['a'\]: a service has options of its own"),
        ("[{name: 'http://h/s', remote: {headers_from_env: {'a b': C}}}]", "headers_from_env.a b: expected the name"),
        ("[{name: 'http://h/s', remote: {timeout: 1}}]", "did you mean 'timeout_s'"),
    ],
)
def test_a_service_has_its_own_fields(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"rewards: {text}", tmp_path)


def test_the_configuration_of_a_foreign_run_sends_nothing_to_anybody(tmp_path: Path) -> None:
    """A URL gets every sample, and a header what the environment holds."""
    config = load("rewards: [{name: 'http://evil/s', remote: {token_env: AWS_SECRET_ACCESS_KEY}}]", tmp_path)
    found = [".".join(map(str, place)) for place, _ in code_in(config.model_dump())]
    assert found == ["rewards.0.name", "rewards.0.remote.token_env"]
    config = load("rewards: [{name: 'http://evil/s', remote: {headers_from_env: {X: PASSWORD}}}]", tmp_path)
    assert ("rewards", 0, "remote", "headers_from_env", "X") in [place for place, _ in code_in(config.model_dump())]


JUDGE = "url: 'http://h/v1', model: m, template: 'Rate {response}.'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{name: judge}]", "rewards.0.judge: belongs to the reward named 'judge', which needs it"),
        (f"[{{name: math, judge: {{{JUDGE}}}}}]", "rewards.0.judge: belongs to the reward named 'judge'.*'math'"),
        (
            "[{name: judge, judge: {url: 'http://h/v1', model: m, template: Rate}}]",
            r"template: expected .* \{response\}",
        ),
        (f"[{{name: judge, judge: {{{JUDGE}, pattern: '(a)(b)'}}}}]", "pattern: .*expected one group, .* it has 2"),
        (f"[{{name: judge, judge: {{{JUDGE}, pattern: '('}}}}]", "pattern: '\\(': expected a regular expression"),
        (f"[{{name: judge, judge: {{{JUDGE}, lowest: 3, highest: 3}}}}]", "highest: 3.0: expected more than lowest"),
    ],
)
def test_a_judge_that_could_give_no_verdict_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"rewards: {text}", tmp_path)


def test_the_judge_of_a_foreign_run_is_asked_nothing(tmp_path: Path) -> None:
    config = load(f"rewards: [{{name: judge, judge: {{{JUDGE}}}}}]", tmp_path)
    assert [place for place, _ in code_in(config.model_dump())] == [("rewards", 0, "judge", "url")]


def test_a_judge_beside_models_that_train_meanwhile_is_refused(tmp_path: Path) -> None:
    judge = "rewards: [{name: judge, judge: {engine: {path: m}, template: '{response}'}}]"
    pools = "pools: {a: {devices_per_node: [1]}, b: {devices_per_node: [1]}, c: {devices_per_node: [1]}}, preset: null"
    shared = f"placement: {{{pools}, roles: {{actor: a, rollout: b}}}}"
    with pytest.raises(ConfigError, match=r"placement.roles.judge: 'a': expected a pool of its own.*while actor may"):
        load(f"{judge}\nschedule: {{max_staleness: 1}}\n{shared}", tmp_path)
    own = f"placement: {{{pools}, roles: {{actor: a, rollout: b, judge: c}}}}"
    assert load(f"{judge}\nschedule: {{max_staleness: 1}}\n{own}", tmp_path).rewards[0].judge.engine.path == "m"
    assert load(f"{judge}\n{shared.replace(', c: {devices_per_node: [1]}', '')}", tmp_path).schedule.max_staleness == 0
