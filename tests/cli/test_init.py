"""`rlsdk init` and `rlsdk config schema`: files that rlsdk takes, and that editors understand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import yaml

from rlsdk.cli import main
from rlsdk.cli.preparation.init import TEMPLATES, Wishes, asked, file_text, settings
from rlsdk.config import load_config
from rlsdk.config.loading.json_schema import config_schema
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
WISHES = Wishes(model="org/model", data="openai/gsm8k:main", reward="gsm8k", gpu=False)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module")
def schema(registry: Registry) -> dict[str, object]:
    return config_schema(registry)


def errors(schema: dict[str, object], data: object) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(data):
        yield error.message


@pytest.mark.parametrize("reward", [*TEMPLATES, "exact"])
def test_what_is_written_is_accepted_and_says_what_each_field_means(reward: str, registry: Registry) -> None:
    wishes = Wishes(model="org/model", data="rows.jsonl", reward=reward, gpu=False)
    text = file_text(settings(wishes, registry), wishes)
    config = load_config(values=yaml.safe_load(text), registry=registry)
    assert config.model.path == "org/model"
    assert config.rewards[0].name == reward
    assert (config.data.prompt_template == "{prompt}") == (reward == "exact")
    lines = text.splitlines()
    sections = [(before, line) for before, line in pairwise(lines) if line[:1].isalpha()]
    assert len(sections) == 9
    assert all(before.startswith("# ") for before, _ in sections)
    assert "# Samples of each prompt" in text or "samples_per_prompt: 8" in text


def test_the_command_writes_once_and_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my run.yaml"
    command = ["init", str(file), "--cpu", "--model", "m", "--data", "d.jsonl", "--reward", "gsm8k"]
    main_code(command, 0)
    assert f"rlsdk train --config '{file}'" in capsys.readouterr().out
    before = file.read_text()
    main_code(command, 2)
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == before
    main_code([*command, "--force", "--algorithm", "dapo"], 0)
    assert "dapo" in file.read_text()


def main_code(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert (left.value.code or 0) == code


def test_what_is_missing_is_asked_for_or_named(registry: Registry) -> None:
    typed = iter(["my/model", "", "gsm8k", "8"])
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return next(typed)

    found = asked({"algorithm": "grpo"}, ask, registry)
    assert found == Wishes(model="my/model", data="openai/gsm8k:main", reward="gsm8k", devices=8, gpu=True)
    assert len(questions) == 4
    with pytest.raises(ConfigError, match=r"add --data \.\.\. --reward \.\.\."):
        asked({"model": "m"}, None, registry)


def test_generated_tasks_have_their_own_reward_and_misspelt_ones_are_asked_for_again(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["my/model", "reasoning_gym:chain_sm", "reasoning_gym:chain_sum", "", "0"])
    found = asked({}, lambda _: next(typed), registry)
    assert found == Wishes(model="my/model", data="reasoning_gym:chain_sum", reward="reasoning_gym", gpu=False)
    assert "did you mean 'chain_sum'?" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--data: reasoning_gym:chain_sm: no such task; did you mean 'chain_sum'"):
        asked({"model": "m", "data": "reasoning_gym:chain_sm", "reward": "gsm8k"}, None, registry)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_are_marked_explained_and_of_the_schema(file: Path, schema: dict[str, object]) -> None:
    text = file.read_text()
    assert "Not yet run on a GPU" in text
    assert file.name in (file.parent / "README.md").read_text()
    data = yaml.safe_load(text)
    data["rollout"].pop("vllm")  # the plugin is not installed here
    assert list(errors(schema, data)) == []


def test_there_are_recipes_from_small_to_large() -> None:
    assert {"gsm8k-qwen2.5-0.5b", "gsm8k-llama-3.3-70b", "code-qwen2.5-7b", "tools-qwen2.5-7b"} <= {
        f.stem for f in RECIPES
    }


def test_the_schema_knows_fields_backends_options_and_short_forms(
    schema: dict[str, object], registry: Registry
) -> None:
    good = yaml.safe_load(file_text(settings(WISHES, registry), WISHES))
    good["train"] = {"backend": "fsdp", "fsdp": {"replicate_size": 2}}
    good["rewards"] = ["mine.py:fn", {"name": "gsm8k", "weight": 0.5}]
    assert list(errors(schema, good)) == []
    assert json.loads(json.dumps(schema)) == schema
    assert "weight" in json.dumps(schema)
    for wrong in (
        {"trainer": {"stepz": 3}}, {"trainer": {"steps": "three"}}, {"rollout": {"top_p": 2}}, {"nothing": {}},
        {"train": {"fsdp": {"replicate": 2}}}, {"rewards": [3]},
    ):  # fmt: skip
        assert list(errors(schema, wrong)), wrong


def test_every_field_of_the_schema_has_a_text(schema: dict[str, object]) -> None:
    definitions = dict(schema["$defs"])  # type: ignore[call-overload]
    bare = [
        f"{name}.{field}"
        for name, one in definitions.items()
        if name.endswith("Config")
        for field, about in one.get("properties", {}).items()
        if not about.get("description")
    ]
    assert bare == []
