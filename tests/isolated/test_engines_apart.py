"""One trainer, engines of other environments: other versions there, nothing of torch pickled on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from rlsdk.registry import IsolatedPlugin, read_record
from rlsdk.testing.process.models import write_tiny_model

ROOT = Path(__file__).parents[2]
E2E = ROOT / "tests" / "e2e"
TASK = (
    "--train-backend", "fsdp", "--data", str(E2E / "sums.jsonl"), "--reward", f"{E2E / 'digits.py'}:share_of_digits",
    "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "6",
    "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
    "--trainer.updates_per_step", "2", "--train.optim.lr", "1e-3", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]", "--eval.every_steps", "null", "--trainer.run_name", "run",
)  # fmt: skip
TIMEOUT_S = 400
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
NO_PICKLE = Path(__file__).parent / "no_pickle"
STAND_INS = ROOT / "plugins" / "sglang" / "tests" / "standins"
"""For what SGLang lacks on a CPU."""
PATHS = {"vllm": str(NO_PICKLE), "sglang": f"{NO_PICKLE}{os.pathsep}{STAND_INS}"}
"""Rollout backends, in the order of their turns, and what is on the path with them."""


@pytest.fixture(scope="session")
def rlsdk(home: Path) -> Callable[..., str]:
    """Runs a command under the home of these tests."""

    def run(*arguments: str, cwd: Path | None = None, expect: int = 0, path: str = str(NO_PICKLE)) -> str:
        environment = {
            **os.environ, "RLSDK_HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": path,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "rlsdk.cli", *arguments],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def engines(home: Path, rlsdk: Callable[..., str], environment_of: Callable[[str], Path]) -> dict[str, IsolatedPlugin]:
    """Names and records of rollout backends that this environment does not have."""
    for name, path in PATHS.items():
        rlsdk("plugins", "install", name, "--environment", str(environment_of(name)), path=path)
    return {name: read_record(home / "plugins" / f"rlsdk-{name}.json") for name in PATHS}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", seed=1))


def test_one_run_trains_here_and_samples_in_each_engines_own_environment_in_turn(
    engines: dict[str, IsolatedPlugin], rlsdk: Callable[..., str], model: str, tmp_path: Path
) -> None:
    """The second engine goes on from what the first one's samples taught."""
    for turn, (name, record) in enumerate(engines.items(), start=1):
        assert record.versions["transformers"] != version("transformers")
        flags = ("--rollout-backend", name, "--trainer.steps", str(2 * turn))
        said = rlsdk("train", "--model", model, *TASK, *flags, cwd=tmp_path, path=PATHS[name])
        assert "failed to close" not in said
        assert ("resumed from" in said) == (turn > 1)
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "policy/grad_norm" in row]
    assert len(steps) == 2 * len(engines)
    assert max(step["parity/log_prob_diff_max"] for step in steps) < 2e-5
    assert all(step["policy/grad_norm"] > 0 for step in steps[1::2])


@pytest.mark.parametrize("name", PATHS)
def test_its_options_are_checked_before_anything_starts(
    name: str, engines: dict[str, IsolatedPlugin], rlsdk: Callable[..., str], model: str, tmp_path: Path
) -> None:
    flags = ["--rollout-backend", name, f"--rollout.{name}.log_levle", "ERROR"]
    said = rlsdk("train", "--model", model, *TASK, *flags, cwd=tmp_path, expect=2)
    assert f"rollout.{name}.log_levle: unknown key; did you mean 'log_level'?" in said
