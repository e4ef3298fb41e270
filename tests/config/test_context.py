"""A run whose rows are longer than its model's positions is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.cli.preparation import plan
from rlsdk.config.checks.context import context_tokens
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import ConfigError
from rlsdk.testing.process.models import write_tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 8192}, "model_type": "seen"}, 8192),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 8.0}}, 16384),
        # Llama 3.1: its length holds the factor already
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full_attention": YARN, "sliding": {}}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": "many", "rope_scaling": {"type": "linear", "factor": "x"}}, None),
    ],
)
def test_positions_of_a_model(fields: dict[str, Any], expected: int | None) -> None:
    assert context_tokens(fields) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))  # 512 positions


def arguments(model: str, *extra: str) -> list[str]:
    return ["--model", model, "--data", "reasoning_gym:chain_sum", "--reward", "reasoning_gym", *extra]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            ["--data.max_prompt_tokens", "100", "--rollout.max_response_tokens", "500"],
            r"rollout\.max_response_tokens: 500: with data\.max_prompt_tokens 100 that is 600 tokens, more than the "
            r"512 that the model of role 'actor' \(model\.path '.*'\) has positions for; at most "
            r"`--rollout\.max_response_tokens 412`",
        ),
        (
            ["--data.max_prompt_tokens", "600", "--rollout.max_response_tokens", "10"],
            r"at most `--data\.max_prompt_tokens 256 --rollout\.max_response_tokens 256`",
        ),
        (
            [
                "--data.max_prompt_tokens",
                "64",
                "--rollout.max_response_tokens",
                "8",
                "--rollout.max_model_tokens",
                "513",
            ],
            r"rollout\.max_model_tokens: 513 tokens, .* at most `--rollout\.max_model_tokens 512`",
        ),
    ],
)
def test_rows_beyond_the_positions_are_refused_by_train_and_plan(model: str, extra: list[str], told: str) -> None:
    """`train` took them, and `plan` said that they fit."""
    with pytest.raises(ConfigError, match=told):
        resolve(Settings(flags=arguments(model, *extra)))
    with pytest.raises(ConfigError, match=told):
        plan.run(arguments(model, *extra), hardware=None, calibration=None, as_json=True)


def test_rows_that_just_fit_are_taken(model: str) -> None:
    resolve(Settings(flags=arguments(model, "--data.max_prompt_tokens", "112", "--rollout.max_response_tokens", "400")))


def test_a_reward_model_of_fewer_positions_is_named(model: str, tmp_path: Path) -> None:
    import json

    folder = tmp_path / "judge"
    folder.mkdir()
    fields = {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(fields))
    sizes = ["--data.max_prompt_tokens", "64", "--rollout.max_response_tokens", "8"]
    with pytest.raises(ConfigError, match=rf"'reward\.judge' \(.*{folder}.*has positions for"):
        resolve(Settings(flags=arguments(model, *sizes, "--reward_models", f"[{{path: {folder}, name: judge}}]")))


@pytest.mark.parametrize(
    ("extra", "lengths"),
    [
        ([], (256, 256)),
        (["--rollout.max_response_tokens", "500"], (12, 500)),
        (["--data.max_prompt_tokens", "100"], (100, 412)),
        (["--rollout.max_response_tokens", "64", "--data.max_prompt_tokens", "64"], (64, 64)),
    ],
)
def test_default_lengths_are_lowered_to_a_short_model_and_said(
    model: str, extra: list[str], lengths: tuple[int, int]
) -> None:
    given = Settings(flags=arguments(model, *extra))
    run = resolve(given, Training.RL)
    assert (run.config.data.max_prompt_tokens, run.config.rollout.max_response_tokens) == lengths
    said = [line for line in run.notices if "the model has 512 positions" in line]
    assert len(said) == (0 if len(extra) == 4 else 1)


@pytest.mark.parametrize("extra", [["--data.max_prompt_tokens", "512"], ["--rollout.max_response_tokens", "600"]])
def test_a_length_that_was_set_is_never_lowered(model: str, extra: list[str]) -> None:
    with pytest.raises(ConfigError, match="has positions for"):
        resolve(Settings(flags=arguments(model, *extra)), Training.RL)
