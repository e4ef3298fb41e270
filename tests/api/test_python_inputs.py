"""Data and rewards that come as Python objects: in files of the run, whole or absent."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsdk.api.python_inputs import stage_inputs
from rlsdk.api.settings import Settings, from_keywords
from rlsdk.config import load_config
from rlsdk.interfaces import ConfigError, DataError, RewardSample
from rlsdk.registry import Registry
from rlsdk.trainer.checkpoints.run_folder import INPUTS

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]


def of_this_module(sample: RewardSample, scale: float = 1.0) -> float:
    return scale


of_this_module.__module__ = "__main__"


def lines(path: str | Path) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_list_a_generator_and_a_data_set_give_the_same_file() -> None:
    from datasets import Dataset

    names = []
    for rows in (ROWS, (row for row in ROWS), Dataset.from_list(ROWS)):
        with stage_inputs(Settings(), data=rows) as given:
            path = given.settings.values["data"]["train"]
            assert lines(path) == ROWS
            names.append(Path(path).name)
    assert len(set(names)) == 1  # the name is a hash of the content
    assert not Path(path).exists()


def test_names_stay_names() -> None:
    with stage_inputs(Settings(), data="reasoning_gym:chain_sum", eval_data=Path("a.jsonl"), reward=["gsm8k"]) as given:
        assert given.settings.values["data"] == {"train": "reasoning_gym:chain_sum", "eval": "a.jsonl"}
        assert given.settings.values["rewards"] == [{"name": "gsm8k"}]


def broken() -> Iterator[dict[str, str]]:
    yield from ROWS
    raise OSError("the source went away")


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([], DataError, "has no rows"),
        (ROWS[0], DataError, "got one mapping"),
        ([1], DataError, "row 1 of data: expected an object with named fields, got int"),
        ([{"question": b"x"}], DataError, "row 1 of data: field 'question': holds a bytes"),
        (5, DataError, "got a int"),
        (broken(), OSError, "the source went away"),
    ],
    ids=["none", "mapping", "numbers", "bytes", "number", "generator"],
)
def test_rows_that_cannot_be_used_say_which(rows: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said), stage_inputs(Settings(), data=rows):
        pass


def test_a_run_has_its_inputs_in_its_own_folder(tmp_path: Path) -> None:
    reward = [functools.partial(of_this_module, scale=2.0), {"name": "gsm8k", "weight": 0.5}]
    with stage_inputs(Settings(), data=iter(ROWS), eval_data=ROWS[:2], reward=reward) as given:
        config = load_config([], [], Registry.discover(), values=given.settings.values)
        moved = given.moved(config, tmp_path)
    assert moved.data.train is not None
    assert moved.data.eval is not None
    assert lines(moved.data.train) == ROWS
    assert lines(moved.data.eval) == ROWS[:2]
    file, _, name = moved.rewards[0].name.rpartition(":")
    assert Path(file).parent == tmp_path / INPUTS
    assert f"def {name}(sample: RewardSample, scale: float=1.0)" in Path(file).read_text()
    assert moved.rewards[0].options == {"scale": 2.0}
    assert (moved.rewards[1].name, moved.rewards[1].weight) == ("gsm8k", 0.5)
    assert {path.suffix for path in (tmp_path / INPUTS).iterdir()} == {".jsonl", ".py"}


def test_a_function_of_a_module_is_named_by_its_file() -> None:
    from own_rewards import length

    with stage_inputs(Settings(), reward=length) as given:
        assert given.settings.values["rewards"] == [{"name": f"{Path(__file__).with_name('own_rewards.py')}:length"}]


def test_values_that_are_bound_by_place_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match="hand values over by name"),
        stage_inputs(Settings(), reward=functools.partial(of_this_module, None)),
    ):
        pass


def test_keywords_are_sections_or_names_with_dots_or_underscores() -> None:
    fields = {"rollout": {"max_response_tokens": 6}, "trainer.prompts_per_step": 4, "data__num_eval_rows": 2}
    settings = from_keywords(fields, config=None, trust_run=False, trainer__steps=3, model__path=Path("m"))
    assert settings.values == {
        "rollout": {"max_response_tokens": 6},
        "trainer": {"prompts_per_step": 4, "steps": 3},
        "data": {"num_eval_rows": 2},
        "model": {"path": "m"},
    }
    assert settings.names_a_task
    assert not from_keywords({}, config=None, trust_run=False).names_a_task


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_response_tokens": 6}, r"write rollout=\{'max_response_tokens': 6\}"),
        ({"betas": [0.9, 0.95]}, r"write train=\{'optim': \{'betas': \[0.9, 0.95\]\}\} or critic="),
        ({"trainr": {}}, r"unknown keyword; did you mean 'trainer'\?"),
        ({"trainer": {"steps": 5}, "trainer.steps": 6}, r"trainer.steps: given twice, as 5 and as 6"),
        ({"trainer__steps": 5, "trainer.steps": 6}, r"trainer.steps: given twice, as 5 and as 6"),
        ({"trainr__steps": 5}, r"unknown keyword"),
    ],
)
def test_a_keyword_that_is_none_names_the_one_that_was_meant(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_keywords(fields, config=None, trust_run=False)


def test_values_of_a_call_lie_over_files_and_are_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {steps: 5, prompts_per_step: 7}\nrewards: ['own.py:score', {name: gsm8k, weight: 2.0}]\n")
    registry = Registry.discover()
    config = load_config([file], [], registry, values={"trainer": {"steps": 6}})
    assert (config.trainer.steps, config.trainer.prompts_per_step) == (6, 7)
    assert [reward.name for reward in config.rewards] == ["own.py:score", "gsm8k"]
    with pytest.raises(ConfigError, match=r"trainer.steps: 'six': expected a whole number \(the call\)"):
        load_config([file], [], registry, values={"trainer": {"steps": "six"}})
    dapo = load_config([file], ["--algorithm=dapo"], registry, values={"algorithm": {"kl_coef": 0.5}})
    assert (dapo.algorithm.recipe, dapo.algorithm.kl_coef) == ("dapo", 0.5)


def test_a_reward_of_another_type_is_refused_by_what_is_expected() -> None:
    empty = from_keywords({}, config=None, trust_run=False)
    refused = pytest.raises(ConfigError, match="reward: 3, a int; expected a function")
    with refused, stage_inputs(empty, reward=3):  # type: ignore[arg-type]
        pass
