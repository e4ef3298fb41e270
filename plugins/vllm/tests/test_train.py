"""Whole runs through the command line: vLLM in the processes of the train engine, or on a device of its own and in a
process beside its worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TASK = (
    "--data", "reasoning_gym:chain_sum", "--data.options", "{size: 200, seed: 1, max_terms: 2, max_digits: 1}",
    "--reward", f"{ROOT / 'tests' / 'e2e' / 'digits.py'}:share_of_digits", "--data.max_prompt_tokens", "96",
    "--rollout.max_response_tokens", "6", "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
    "--trainer.updates_per_step", "2", "--train.optim.lr", "1e-3", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]", "--eval.every_steps", "null", "--trainer.steps", "2",
)  # fmt: skip
SEPARATE = [
    "--placement.pools", "{a: {devices_per_node: [2]}, b: {devices_per_node: [1]}}",
    "--placement.roles", "{actor: a, rollout: b}",
]  # fmt: skip
ASYNCHRONOUS = ["--rollout.vllm.asynchronous", "true"]
ADAPTER = ["--placement.devices_per_node", "2", "--model.lora.rank", "4", "--train.optim.lr", "1e-2"]
RUNS = {
    "an adapter alone, colocated": ADAPTER,
    "two replicas, colocated": ["--placement.devices_per_node", "2"],
    "asynchronous, separate from two ranks": [*SEPARATE, *ASYNCHRONOUS],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_from_samples_of_the_weights_that_it_trains(qwen2: Path, tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "rlsdk.cli", "train", "--model", str(qwen2)]
    command += ["--train-backend", "fsdp", "--rollout-backend", "vllm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *TASK, "--trainer.run_name", "run", *RUNS[name]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed to close" not in done.stdout + done.stderr
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (row for row in map(json.loads, lines) if "policy/grad_norm" in row)
    assert first["parity/log_prob_diff_max"] < 2e-5
    assert second["policy/grad_norm"] > 0
    if RUNS[name] is ADAPTER:
        assert "syncs send the adapter alone" in done.stdout
        assert [row["sync/base_bytes"] > 0 for row in (first, second)] == [True, False]
        assert second["sync/bytes"] < first["sync/bytes"] / 20
        assert first["sync/adapter_effect"] == 0.0 < second["sync/adapter_effect"]
        assert second["parity/log_prob_diff_max"] < 2e-5


def test_a_teacher_in_vllm_gives_the_log_probs_of_the_same_in_fsdp(qwen2: Path, tmp_path: Path) -> None:
    """One in each engine, beside the policy on one device; of the policy's own model, so that the first step has no
    gap."""
    given = [
        {"path": str(qwen2), "name": "vllm", "rollout": {}, "weight": 0.0},
        {"path": str(qwen2), "name": "fsdp", "weight": 0.0},
    ]
    command = [sys.executable, "-m", "rlsdk.cli", "train", "--model", str(qwen2), "--teachers", json.dumps(given)]
    command += ["--train-backend", "fsdp", "--rollout-backend", "vllm", "--rollout.vllm.kv_cache_mb", "64"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *TASK, "--trainer.run_name", "run", "--trainer.updates_per_step", "1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (row for row in map(json.loads, lines) if "policy/grad_norm" in row)
    for step in (first, second):
        assert step["teacher/vllm/tokens"] == step["teacher/fsdp/tokens"] > 0
        assert abs(step["teacher/vllm/gap"] - step["teacher/fsdp/gap"]) < 2e-6
    assert abs(first["teacher/vllm/gap"]) < 2e-6 < abs(second["teacher/vllm/gap"])


def test_the_quickstart_gives_the_numbers_of_the_recorded_run(tmp_path: Path) -> None:
    """On FSDP and vLLM, within what another processor does to the last digits of a sum."""
    recorded = json.loads((Path(__file__).with_name("recorded") / "quickstart.json").read_text())["steps"]
    stop = tmp_path / "stop.py"
    stop.write_text(
        "def after(step, metrics):\n    if step == 3:\n        raise SystemError('three steps are enough')\n"
    )
    command = [sys.executable, "-m", "rlsdk.cli", "train", "--train-backend", "fsdp", "--rollout-backend", "vllm"]
    command += ["--steps", "10", "--eval.at_start", "false", "--trainer.save_every_steps", "null"]
    command += ["--tracking.trackers", "[jsonl]", "--trainer.callbacks", f"[{stop}:after]", "--trainer.run_name", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert "three steps are enough" in done.stdout + done.stderr
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "reward/mean" in row]
    assert len(found) == len(recorded) == 3
    for theirs, mine in zip(recorded, found, strict=True):
        for name in ("reward/mean", "reward/std", "response/tokens_mean", "policy/grad_norm", "policy/loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name
