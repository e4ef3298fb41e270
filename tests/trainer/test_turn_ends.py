"""One token ends an answer: in everything that is learned, and in everything that is sampled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pair_runs import Recorder

from rlsdk.config import JudgeEngineConfig, ModelConfig, PairTraining, RunConfig, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.registry import Registry
from rlsdk.rewards.services.judge import JudgeOptions
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.inputs.judges import EngineJudge
from rlsdk.trainer.runs.build_supervised import read_pairs
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template ends turns with `<|stop|>`, its tokenizer's end-of-sequence token is `<eos>`."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=1)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|stop|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    made = [{"question": f"{at}+1?", "answer": str(at + 1), "chosen": "y", "rejected": "n"} for at in range(12)]
    file.write_text("\n".join(map(json.dumps, made)))
    return file


def config_of(model: Path, rows: Path, registry: Registry, *extra: str) -> RunConfig:
    task = ["--model", str(model), "--data", str(rows), "--tracking.trackers", "[]", "--eval.every_steps", "null",
            "--reward", "exact", "--rollout.max_response_tokens", "9", "--data.max_prompt_tokens", "50"]  # fmt: skip
    return load_config([], [*task, *extra], registry)


def ends_of(run_inputs: RunInputs) -> Mapping[str, set[int]]:
    """The last tokens of everything that is learned."""
    assert run_inputs.learned is not None
    pairs = read_pairs(PairTraining.DPO, run_inputs).train
    return {
        "sft": {row.token_ids[-1] for rows in run_inputs.learned[1] for row in rows},
        "ptx": {example.answer_ids[-1] for example in run_inputs.examples},
        "chosen": {ids[-1] for ids in pairs.chosen},
        "rejected": {ids[-1] for ids in pairs.rejected},
    }


@pytest.mark.parametrize(
    ("extra", "end", "stops"),
    [
        ([], "<|stop|>", ["<|stop|>", "<eos>"]),
        (["--data.chat_template", "never"], "<eos>", ["<eos>"]),
        (["--rollout.stop_token_ids", "['<eos>', '<|stop|>']"], "<|stop|>", ["<eos>", "<|stop|>"]),
        (["--rollout.stop_token_ids", "['9', '<eos>']"], "<eos>", ["9", "<eos>"]),
        (["--rollout.stop_token_ids", "['9']"], "9", ["9"]),
    ],
)
def test_everything_that_is_learned_ends_with_a_token_at_which_responses_stop(
    model: Path, rows: Path, registry: Registry, tmp_path: Path, extra: list[str], end: str, stops: list[str]
) -> None:
    config = config_of(model, rows, registry, "--sft.steps", "2", "--algorithm.ptx.coef", "0.1", *extra)
    view = Recorder()
    with closing(build_run_inputs(config, registry, tmp_path, view, of_pairs=True)) as run_inputs:
        ids = run_inputs.tokenizer.convert_tokens_to_ids
        assert run_inputs.sampling.stop_token_ids == tuple(map(ids, stops))
        assert ends_of(run_inputs) == {kind: {ids(end)} for kind in ("sft", "ptx", "chosen", "rejected")}
    said = [line for line in view.notices if "answers end with" in line]
    assert len(said) == (end != "<eos>")
    assert all(repr(end) in line and "'<eos>'" in line for line in said)


def test_a_judge_stops_where_its_template_ends_a_turn(model: Path) -> None:
    asked = JudgeEngineConfig(path=str(model), max_model_tokens=64)
    judge = EngineJudge(
        "judge",
        JudgeOptions(model=str(model), template="{response}", max_tokens=6),
        asked,
        ModelConfig(path=str(model)),
    )
    names = load_tokenizer(str(model)).convert_ids_to_tokens(list(judge._sampling.stop_token_ids))
    assert names == ["<|stop|>", "<eos>"]


def endless(model: Path, folder: Path) -> Path:
    """A copy of the model whose tokenizer has neither an end-of-sequence token nor a chat template."""
    shutil.copytree(model, folder)
    tokenizer: Any = load_tokenizer(str(model))
    tokenizer.eos_token, tokenizer.chat_template = None, None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def test_a_model_without_any_end_is_refused_before_anything_is_learned(
    model: Path, rows: Path, registry: Registry, tmp_path: Path
) -> None:
    folder = endless(model, tmp_path / "endless")
    (folder / "generation_config.json").unlink()
    config = config_of(folder, rows, registry, "--sft.steps", "2")
    with pytest.raises(ConfigError, match=r"name one in rollout\.stop_token_ids"):
        build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False)


def test_an_end_that_only_the_generation_config_names_is_learned(
    model: Path, rows: Path, registry: Registry, tmp_path: Path
) -> None:
    folder = endless(model, tmp_path / "listed")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = config_of(folder, rows, registry, "--sft.steps", "2")
    with closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False)) as run_inputs:
        assert run_inputs.learned is not None
        assert {row.token_ids[-1] for rows in run_inputs.learned[1] for row in rows} == {5}
        assert run_inputs.sampling.stop_token_ids == (5, 6)
