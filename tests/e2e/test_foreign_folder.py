"""Commands typed in a stranger's folder: whatever modules lie there, no process of a run imports one."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import SUMS, environment

TRAP = """import os, sys
with open({log!r}, "a") as log:
    log.write(f"{{__file__}} by {{sys.orig_argv[:4]}}\\n")
"""
NOT_INSTALLED = ("sitecustomize", "usercustomize", "conftest", "flash_attn", "gmpy2", "flint", "apex", "triton", "vllm")
"""Modules that Python or a library looks for, and does without."""
TRAIN = (
    "train", "--data", "sums.jsonl", "--reward", "math", "--data.num_eval_rows", "4", "--data.max_prompt_tokens", "96",
    "--rollout.max_response_tokens", "4", "--trainer.prompts_per_step", "2", "--trainer.samples_per_prompt", "2",
    "--train.micro_batch_tokens", "2048", "--tracking.trackers", "[jsonl]", "--trainer.run_dir", ".",
    "--trainer.run_name", "run", "--trainer.steps", "1",
)  # fmt: skip


def set_traps(folder: Path, log: Path) -> None:
    """A module of every name that Python or an installed package has, and of some that are not installed."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    for name in (sys.stdlib_module_names | installed | {*NOT_INSTALLED}) - {"__main__"}:
        (folder / f"{name}.py").write_text(TRAP.format(log=str(log)))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def run(model: str, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained in the folder of its data, between traps; its own folder is full of them, too."""
    folder = tmp_path_factory.mktemp("stranger")
    set_traps(folder, log)
    (folder / "sums.jsonl").write_bytes(SUMS.read_bytes())
    command([*TRAIN, "--model", model], folder)
    set_traps(folder / "run", log)
    return folder / "run"


def command(arguments: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlsdk", *arguments], cwd=folder, env=environment(), capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_training_imports_nothing_from_the_folder_of_its_data(run: Path, log: Path) -> None:
    assert not log.exists(), log.read_text()


@pytest.mark.parametrize(
    "arguments",
    [["eval", "."], ["plan", "--config", "config.yaml"], ["plugins", "list"]],
    ids=lambda arguments: arguments[0],
)
def test_a_command_imports_nothing_from_the_folder_of_the_run(arguments: Sequence[str], run: Path, log: Path) -> None:
    command(arguments, run)
    assert not log.exists(), log.read_text()
