"""A run that shall report to Weights & Biases on a machine that nobody has logged in on: wandb itself is run."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rlsdk.testing.process.models import write_tiny_model

SECONDS = 120
FLAGS = (
    "--data", str(Path(__file__).parents[1] / "e2e" / "sums.jsonl"),
    "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "6", "--trainer.steps", "2",
    "--data.num_eval_rows", "4", "--reward", f"{Path(__file__).with_name('rewards.py')}:share_of_digits",
    "--tracking.trackers", "[jsonl, wandb]",
)  # fmt: skip


def train(folder: Path, stdin: int) -> subprocess.CompletedProcess[str]:
    model = write_tiny_model(folder / "model", seed=1)
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC")
    home = {name: str(folder) for name in ("HOME", "WANDB_CONFIG_DIR", "XDG_CONFIG_HOME")}
    outside = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "-m", "rlsdk.cli", "train", "--model", str(model), *FLAGS], cwd=folder, stdin=stdin,
        env={**outside, **home}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("where", ["in a script", "at a terminal"])
def test_the_run_is_refused_at_once_and_says_how_to_log_in(where: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        done = train(tmp_path, theirs if where == "at a terminal" else subprocess.DEVNULL)
    finally:
        os.close(ours)
        os.close(theirs)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "tracking.trackers: 'wandb' cannot start" in error
    for way in ("wandb login", "WANDB_API_KEY", "WANDB_MODE=offline"):
        assert way in error
    assert not list(tmp_path.glob("runs/*"))
