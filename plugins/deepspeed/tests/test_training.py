"""Whole runs through the command line: DeepSpeed trains, another engine samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TASK = (
    "--data", "reasoning_gym:chain_sum", "--data.options", "{size: 200, seed: 1, max_terms: 2, max_digits: 1}",
    "--reward", "digits.py:share_of_digits", "--data.num_eval_rows", "16", "--data.max_prompt_tokens", "96",
    "--rollout.max_response_tokens", "6", "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
    "--trainer.updates_per_step", "2", "--train.optim.lr", "1e-3", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]", "--train-backend", "deepspeed", "--placement.devices_per_node", "2",
)  # fmt: skip
REWARD = """
def share_of_digits(sample):
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
"""


def rlsdk(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlsdk.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def steps(place: Path, run: str = "run") -> list[dict[str, Any]]:
    """Metrics of the steps taken so far; several lines may speak of one."""
    found: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, (place / "runs" / run / "metrics.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], {}).update(line)
    return [found[step] for step in sorted(found) if "reward/mean" in found[step]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "digits.py").write_text(REWARD)
    return folder


def test_zero_2_trains_what_transformers_samples(place: Path, models: dict[str, str]) -> None:
    run = ("--model", models["plain"], "--trainer.run_name", "run", "--trainer.save_every_steps", "2")
    rlsdk("train", *run, *TASK, "--trainer.steps", "2", cwd=place)
    lines = steps(place)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["parity/log_prob_diff_max"] < 2e-5
    assert (place / "runs" / "run" / "checkpoints" / "step_00000002").is_dir()


def test_the_run_goes_on_with_zero_3_and_vllm(place: Path, models: dict[str, str]) -> None:
    """Another stage, another rollout engine with tensor parallelism of its own, the same numbers where they meet."""
    options = ("--train.deepspeed.zero_stage", "3", "--rollout-backend", "vllm", "--rollout.tp_size", "2")
    run = ("--model", models["plain"], "--trainer.run_name", "run", "--trainer.save_every_steps", "2")
    rlsdk("train", *run, *TASK, *options, "--trainer.steps", "4", cwd=place)
    lines = steps(place)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["parity/log_prob_diff_max"] < 5e-5 for line in lines)
    assert lines[-1]["policy/version"] == 8


def test_an_adapter_of_zero_3_is_served_alone_by_vllm(place: Path, models: dict[str, str]) -> None:
    """Only A and B are sent after the first sync, and vLLM computes with them."""
    options = ("--train.deepspeed.zero_stage", "3", "--rollout-backend", "vllm", "--rollout.tp_size", "2")
    save = ("--trainer.save_every_steps", "2")
    adapter = ("--model.lora.rank", "8", "--model.lora.sync", "adapter", "--trainer.run_name", "adapter")
    rlsdk("train", "--model", models["plain"], *adapter, *TASK, *options, "--trainer.steps", "2", *save, cwd=place)
    lines = steps(place, "adapter")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["parity/log_prob_diff_max"] < 5e-5 for line in lines)
    assert lines[-1]["sync/adapter_effect"] > 0
    exported = place / "runs" / "adapter" / "checkpoints" / "step_00000002" / "model"
    written = {path.name for path in exported.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= written
