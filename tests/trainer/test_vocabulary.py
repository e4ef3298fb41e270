"""A token that a model has no row for is found before a worker exists, with both numbers and the row."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pair_runs import Recorder

from rlsdk.config import PairTraining, RunConfig, load_config, roles
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.inputs.vocabulary import odd_ends
from rlsdk.trainer.runs.build_supervised import read_pairs
from rlsdk.trainer.runs.inference import known_ends
from rlsdk.trainer.runs.run_inputs import build_run_inputs

NUM_TOKENS = 97
"""Of the tokenizer that comes with a tiny model."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def model_of(folder: Path, *, added: tuple[str, ...] = (), end: str | None = None, **shape: Any) -> Path:
    """A tiny model, with further tokens in its tokenizer."""
    write_tiny_model(folder, layers=1, **shape)
    tokenizer: Any = load_tokenizer(str(folder))
    tokenizer.add_tokens(list(added))
    if end is not None:
        tokenizer.eos_token = end
    tokenizer.save_pretrained(folder)
    return folder


def config_of(model: Path, folder: Path, registry: Registry, rows: list[dict[str, str]], *extra: str) -> RunConfig:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    task = ["--model", str(model), "--data", str(file), "--tracking.trackers", "[]", "--eval.every_steps", "null",
            "--reward", "exact", "--rollout.max_response_tokens", "9"]  # fmt: skip
    return load_config([], [*task, *extra], registry)


PLAIN = [{"question": f"{at}+1?", "answer": "2", "chosen": "y", "rejected": "n"} for at in range(4)]


def refused(config: RunConfig, registry: Registry, folder: Path, **options: Any) -> str:
    with (
        pytest.raises((ConfigError, DataError)) as caught,
        closing(build_run_inputs(config, registry, folder, Recorder(), rewarded=False, **options)) as run_inputs,
    ):
        read_pairs(PairTraining.DPO, run_inputs)
    return str(caught.value)


def test_a_tokenizer_of_another_model_is_refused_with_both_numbers(registry: Registry, tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", vocab_size=60)
    said = refused(config_of(model, tmp_path, registry, PLAIN), registry, tmp_path)
    assert f"has {NUM_TOKENS} tokens with ids up to {NUM_TOKENS - 1}" in said
    assert "as token 60, but model.path" in said
    assert "has vocab_size 60: ids 0 to 59" in said
    assert "--model.tokenizer FOLDER" in said
    config, tokenizer = config_of(model, tmp_path, registry, PLAIN), load_tokenizer(str(model))
    with pytest.raises(ConfigError, match="has vocab_size 60"):
        known_ends(config, tokenizer, [], print)


def test_the_end_of_an_answer_needs_a_row(registry: Registry, tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", added=("<done>",), end="<done>", vocab_size=NUM_TOKENS)
    said = refused(config_of(model, tmp_path, registry, PLAIN), registry, tmp_path)
    assert f"reads '<done>' as token {NUM_TOKENS}, but model.path" in said


@pytest.mark.parametrize(
    ("row", "extra", "options"),
    [
        ({"question": "a <new> b"}, (), {}),
        ({"answer": "a <new>"}, ("--sft.steps", "1"), {}),
        ({"chosen": "<new>"}, (), {"of_pairs": True}),
        ({"rejected": "<new>"}, (), {"of_pairs": True}),
    ],
)
def test_an_added_token_is_refused_where_the_data_uses_it(
    registry: Registry, tmp_path: Path, row: dict[str, str], extra: tuple[str, ...], options: dict[str, bool]
) -> None:
    model = model_of(tmp_path / "m", added=("<new>",), vocab_size=NUM_TOKENS)
    config = config_of(model, tmp_path, registry, [*PLAIN, {**PLAIN[0], "question": "?", **row}], *extra)
    said = refused(config, registry, tmp_path, **options)
    assert f"rows.jsonl:5: the tokenizer reads '<new>' as token {NUM_TOKENS}, but model.path" in said
    assert f"has vocab_size {NUM_TOKENS}" in said


def test_added_tokens_that_the_data_does_not_use_are_said(registry: Registry, tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", added=("<new>", "<other>"), vocab_size=NUM_TOKENS)
    view = Recorder()
    config = config_of(model, tmp_path, registry, PLAIN, "--sft.steps", "1", "--algorithm.ptx.coef", "0.1")
    build_run_inputs(config, registry, tmp_path, view).close()
    (said,) = [line for line in view.notices if "added tokens" in line]
    assert f"2 added tokens from '<new>' = {NUM_TOKENS} on are unknown to model.path" in said


def test_first_and_last_tokens_that_do_not_exist_are_said(registry: Registry, tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", vocab_size=120)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"eos_token_id": 120, "bos_token_id": -1}))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 100, 151645]}')
    view, config = Recorder(), config_of(model, tmp_path, registry, PLAIN)
    build_run_inputs(config, registry, tmp_path, view).close()
    said = [line.removeprefix(f"model.path {str(model)!r}: ") for line in view.notices if "there" in line]
    assert said == [
        "generation_config.json has eos_token_id [100, 151645], but the tokenizer has ids 0 to 96: no response ends "
        "there",
        "config.json has bos_token_id -1, but vocab_size 120: no prompt begins there",
        "config.json has eos_token_id 120, but vocab_size 120: no response ends there",
    ]
    heard: list[str] = []
    known_ends(config, load_tokenizer(str(model)), [], heard.append)
    assert len(heard) == 3
    own = config_of(model, tmp_path, registry, PLAIN, "--rollout.stop_token_ids", "[2]")
    assert not any("generation_config" in line for line in odd_ends(own, load_tokenizer(str(model))))


def test_a_model_with_more_rows_than_tokens_is_usual(registry: Registry, tmp_path: Path) -> None:
    view = Recorder()
    config = config_of(model_of(tmp_path / "m", vocab_size=300), tmp_path, registry, PLAIN)
    build_run_inputs(config, registry, tmp_path, view).close()
    assert not [line for line in view.notices if "vocab_size" in line]


def test_every_model_of_the_run_is_compared(registry: Registry, tmp_path: Path) -> None:
    model, small = model_of(tmp_path / "m"), model_of(tmp_path / "small", vocab_size=50)
    config = config_of(model, tmp_path, registry, PLAIN, "--reward_models", json.dumps([{"path": str(small)}]))
    said = refused(config, registry, tmp_path, table=roles(config))
    assert f"reward_models.0.path {str(small)!r} has vocab_size 50" in said


@pytest.mark.parametrize("pad", [500, -500])
def test_a_padding_token_without_a_row_is_named(registry: Registry, tmp_path: Path, pad: int) -> None:
    folder = tmp_path / "m"
    model_of(folder)
    config_file = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config_file, "pad_token_id": pad}))
    said = refused(config_of(folder, tmp_path, registry, PLAIN), registry, tmp_path)
    assert f"config.json has pad_token_id {pad}, but vocab_size 128" in said
    shutil.rmtree(folder)
