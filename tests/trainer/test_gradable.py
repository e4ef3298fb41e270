"""Rows that a reward cannot grade are seen before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.config import RewardConfig
from rlsdk.data import DataRow, PromptFormat
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry
from rlsdk.trainer.inputs.reward_preflight import MOST_ROWS, check_gradable, rationale_notices


def rows(*answers: str | None) -> list[DataRow]:
    made = [
        DataRow(row={"question": "?", "answer": text, "of": text}, source=f"f:{i}") for i, text in enumerate(answers)
    ]
    return PromptFormat().select(made)


def asked(name: str, **given: object) -> list[RewardConfig]:
    return [RewardConfig.model_validate({"name": name, **given})]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@pytest.mark.parametrize("name", ["gsm8k", "choice", "math", "exact", "fuzzy"])
def test_rows_without_any_answer_are_refused(name: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"none of the 2 rows.*f:0.*--data.answer_field FIELD.*'question'"):
        check_gradable(asked(name), rows(None, None), registry)


@pytest.mark.parametrize(
    ("name", "answer"),
    [("gsm8k", "so it is #### 1,234"), ("choice", "B"), ("math", "1/2"), ("exact", "x"), ("fuzzy", "x")],
)
def test_rows_with_an_answer_pass_in_silence(name: str, answer: str, registry: Registry) -> None:
    assert check_gradable(asked(name), rows(answer, answer), registry) == []


def test_some_rows_are_told_of(registry: Registry) -> None:
    (told,) = check_gradable(asked("gsm8k"), rows("1", "one", None, "4"), registry)
    assert told.startswith("gsm8k: 2 of 4 rows")
    assert "f:1: reference answer 'one' is not a number" in told


def test_only_rows_that_the_reward_is_for_count(registry: Registry) -> None:
    assert check_gradable(asked("gsm8k", rows={"of": ["1"]}), rows("1", "B"), registry) == []
    with pytest.raises(ConfigError, match="none of the 1 rows"):
        check_gradable(asked("gsm8k", rows={"of": ["B"]}), rows("1", "B"), registry)


def test_options_count_and_what_is_only_measured_refuses_nothing(registry: Registry) -> None:
    assert check_gradable(asked("exact", options={"field": "question"}), rows(None, None), registry) == []
    assert check_gradable(asked("gsm8k", weight=0.0), rows(None, None), registry) == []
    assert check_gradable(asked("format"), rows(None, None), registry) == []
    assert check_gradable(asked("gsm8k"), rows(None, None), registry, only=lambda name: False) == []


def test_many_rows_cost_as_little_as_a_thousand(registry: Registry) -> None:
    (told,) = check_gradable(asked("gsm8k"), rows(*["1", None] * MOST_ROWS), registry)
    assert f"of {MOST_ROWS:,} rows looked at" in told
    assert 400 < int(told.removeprefix("gsm8k: ").split()[0]) < 600


def test_a_function_of_verl_is_told_of_answers_with_their_rationale(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def verl(data_source, solution_str, ground_truth, extra_info=None): ...\n\n\n"
        "def own(sample): ...\n\n\ndef trl(completions, **columns): ...\n"
    )
    given = [one for name in ("verl", "own", "trl") for one in asked(f"{file}:{name}")]
    long = rows("Two and two make\nfour.\n#### 4", "It is five.\n#### 5")
    (told,) = rationale_notices(given, long)
    assert told.startswith("reward verl: its ground_truth is a rationale")
    assert "--reward gsm8k" in told
    assert not [*rationale_notices(given, rows("4", "#### 5", "a\n# b"))]
    assert not [*rationale_notices(given, rows(None))]
