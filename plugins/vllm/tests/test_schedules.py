"""Overlap on engines that users run: FSDP and vLLM on pools of their own, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_train import ROOT, TASK

APART = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]
TIMED = ("time/", "throughput/", "sync/moved_bytes")
REWARD = """
import zlib
from rlsdk.interfaces import RewardRecord

def digits(sample):
    share = sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
    return RewardRecord(score=share, metrics={"ids": zlib.crc32(sample.response.encode())})
"""
"""Its mean over a step's samples tells whether any of them differs."""


def train(model: Path, folder: Path, *extra: str) -> list[Mapping[str, float]]:
    """The metrics of each step."""
    command = [sys.executable, "-m", "rlsdk.cli", "train", "--model", str(model)]
    command += ["--train-backend", "fsdp", "--rollout-backend", "vllm", *TASK, "--trainer.steps", "4"]
    command += ["--trainer.save_every_steps", "null", "--trainer.run_dir", str(folder), "--trainer.run_name", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *extra], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/grad_norm" in row]


def untimed(steps: list[Mapping[str, float]]) -> list[Mapping[str, float]]:
    return [{name: value for name, value in step.items() if not name.startswith(TIMED)} for step in steps]


def test_staleness_0_on_pools_of_its_own_is_the_synchronous_run_and_1_trains_what_is_one_step_old(
    qwen2: Path, tmp_path: Path
) -> None:
    together = train(qwen2, tmp_path / "together")
    apart = train(qwen2, tmp_path / "apart", *APART)
    assert len(together) == 4
    assert untimed(apart) == untimed(together)
    stale = train(qwen2, tmp_path / "stale", *APART, "--schedule.max_staleness", "1")
    assert [step["schedule/staleness_mean"] for step in stale] == [0, 1, 1, 1]
    assert stale[0]["reward/mean"] == together[0]["reward/mean"]
    assert stale[2]["policy/grad_norm"] != together[2]["policy/grad_norm"]
    assert max(step["parity/log_prob_diff_max"] for step in stale[:1]) < 2e-5


def test_an_adapter_at_staleness_1_gives_the_same_samples_whatever_runs_beside_them(
    qwen2: Path, tmp_path: Path
) -> None:
    """In the worker's process and in one of its own, where versions meet in other passes."""
    (reward := tmp_path / "reward.py").write_text(REWARD)
    adapter = ["--model.lora.rank", "4", "--train.optim.lr", "1e-2", "--reward", f"{reward}:digits"]
    more = [*APART, *adapter, "--schedule.max_staleness", "1", "--rollout.max_response_tokens", "48"]
    here, beside = (
        train(qwen2, tmp_path / value, *more, "--rollout.vllm.asynchronous", value) for value in ("false", "true")
    )
    assert [step["schedule/staleness_mean"] for step in here] == [0, 1, 1, 1]
    assert max(step["sync/bytes"] for step in here[1:]) < here[0]["sync/bytes"] / 20
    assert len({step["reward/digits/ids"] for step in here}) == 4
    for name in ("reward/digits/ids", "reward/mean", "response/tokens_mean", "schedule/staleness_max"):
        assert [step[name] for step in beside] == [step[name] for step in here], name
    norms = [[step["policy/grad_norm"] for step in steps] for steps in (here, beside)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
