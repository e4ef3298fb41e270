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
from rlsdk.testing.models import write_tiny_model

ROOT = Path(__file__).parents[2]
E2E = ROOT / "tests" / "e2e"
TASK = (
    "--train-backend", "fsdp", "--data", str(E2E / "sums.jsonl"), "--reward", f"{E2E / 'digits.py'}:share_of_digits",
    "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "6",
    "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
    "--trainer.updates_per_step", "2", "--train.optim.lr", "1e-3", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]", "--eval.every_steps", "null", "--trainer.steps", "2",
)  # fmt: skip
ENGINES = ("vllm", "sglang")
TIMEOUT_S = 400
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
NO_PICKLE = Path(__file__).parent / "no_pickle"
STAND_INS = ROOT / "plugins" / "sglang" / "tests" / "standins"
"""For what that engine lacks on a CPU. Python takes one `sitecustomize` only, so there pickling is not forbidden."""


@pytest.fixture(scope="session")
def rlsdk(home: Path) -> Callable[..., str]:
    """Runs a command under the home of these tests."""

    def run(*arguments: str, cwd: Path | None = None, expect: int = 0, path: Path = NO_PICKLE) -> str:
        environment = {
            **os.environ, "RLSDK_HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "rlsdk.cli", *arguments],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, home: Path, rlsdk: Callable[..., str], environment_of: Callable[[str], Path]
) -> tuple[str, IsolatedPlugin]:
    """Name and record of a rollout backend that this environment does not have."""
    path = STAND_INS if request.param == "sglang" else NO_PICKLE
    rlsdk("plugins", "install", request.param, "--environment", str(environment_of(request.param)), path=path)
    return request.param, read_record(home / "plugins" / f"rlsdk-{request.param}.json")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", seed=1))


def test_a_run_trains_here_and_samples_in_the_engines_own_environment(
    engine: tuple[str, IsolatedPlugin], rlsdk: Callable[..., str], model: str, tmp_path: Path
) -> None:
    name, record = engine
    assert record.versions["transformers"] != version("transformers")
    path = STAND_INS if name == "sglang" else NO_PICKLE
    flags = ("--rollout-backend", name, "--trainer.run_name", "run")
    said = rlsdk("train", "--model", model, *TASK, *flags, cwd=tmp_path, path=path)
    assert "failed to close" not in said
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (row for row in map(json.loads, lines) if "policy/grad_norm" in row)
    assert first["parity/log_prob_diff_max"] < 2e-5
    assert second["policy/grad_norm"] > 0


def test_its_options_are_checked_before_anything_starts(
    engine: tuple[str, IsolatedPlugin], rlsdk: Callable[..., str], model: str, tmp_path: Path
) -> None:
    name, _ = engine
    flags = ["--rollout-backend", name, f"--rollout.{name}.log_levle", "ERROR"]
    said = rlsdk("train", "--model", model, *TASK, *flags, cwd=tmp_path, expect=2)
    assert f"rollout.{name}.log_levle: unknown key; did you mean 'log_level'?" in said
