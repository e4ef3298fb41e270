"""Whole runs through the command line, on the real cluster, with real engines."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from rlsdk.testing.process.models import write_tiny_model

REWARD = Path(__file__).with_name("digits.py")
SUMS = Path(__file__).with_name("sums.jsonl")
GENERATED = (
    "--data", "reasoning_gym:chain_sum", "--data.options", "{size: 200, seed: 1, max_terms: 2, max_digits: 1}",
)  # fmt: skip
"""In place of the file: what importing that package takes is not for every run."""
TASK = (
    "--data", str(SUMS),
    "--reward", f"{REWARD}:share_of_digits", "--data.max_prompt_tokens", "96",
    "--rollout.max_response_tokens", "6", "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
    "--trainer.updates_per_step", "2", "--train.optim.lr", "1e-3", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]",
)  # fmt: skip
"""Small enough that a step takes a fraction of a second."""
HELD_OUT = ("--data.num_eval_rows", "16")
"""For runs with evaluations."""
ANSWERS = (
    "--data", str(SUMS), *HELD_OUT, "--data.max_prompt_tokens", "96",
    "--rollout.max_response_tokens", "6", "--train.micro_batch_tokens", "2048", "--tracking.trackers", "[jsonl]",
)  # fmt: skip
"""The same rows, for training on their answers."""


WHOLE = (
    "--sft.steps", "20", "--sft.lr", "1e-3", "--sft.save_every_steps", "5", "--algorithm.kl_coef", "0.1",
    "--trainer.save_every_steps", "2", "--train.optim.lr", "1e-5",
)  # fmt: skip
"""A run with everything that it can be killed in: a warm start, and a reference policy that comes of it. Small steps:
the first stay near the reference."""
TRAP = """import os, sys
with open({log!r}, "a") as log:
    log.write(f"{{__file__}} by {{sys.orig_argv[:4]}}\\n")
"""
NOT_INSTALLED = ("sitecustomize", "usercustomize", "conftest", "flash_attn", "gmpy2", "flint", "apex", "triton", "vllm")
"""Modules that Python or a library looks for, and does without."""


def set_traps(folder: Path, log: Path) -> None:
    """A module of every name that Python or an installed package has, and of some that are not installed."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    for name in (sys.stdlib_module_names | installed | {*NOT_INSTALLED}) - {"__main__"}:
        (folder / f"{name}.py").write_text(TRAP.format(log=str(log)))


@pytest.fixture(scope="session")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File that names the modules of strangers' folders that were imported; it is not there while there are none."""
    return tmp_path_factory.mktemp("trapped") / "log"


@pytest.fixture(scope="session")
def uninterrupted(model: str, trapped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm start and six steps in one go, in the folder of its data, among traps; its own folder is full of them."""
    folder = tmp_path_factory.mktemp("whole")
    set_traps(folder, trapped)
    rows = folder / SUMS.name
    rows.write_bytes(SUMS.read_bytes())
    rlsdk(*[str(rows) if word == str(SUMS) else word for word in train_arguments(model, "whole", 6, WHOLE)], cwd=folder)
    set_traps(folder / "runs" / "whole", trapped)
    return folder / "runs" / "whole"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def command(*arguments: str) -> list[str]:
    # As the installed program: `-m` alone would look for modules in the current folder before anything can prevent it.
    return [sys.executable, "-P", "-m", "rlsdk.cli", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def rlsdk(*arguments: str, cwd: Path, expect: int = 0, timeout_s: float = 240.0) -> str:
    """Runs a command to its end; returns what it printed, stderr after stdout."""
    done = subprocess.run(
        command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == expect, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def train_arguments(model: str, name: str, steps: int, extra: Sequence[str] = ()) -> list[str]:
    held_out = () if "--eval.every_steps" in extra else HELD_OUT
    task = [*TASK, *held_out, "--trainer.run_name", name, "--trainer.steps", str(steps)]
    return ["train", "--model", model, *task, *extra]


def descendants(pid: int) -> list[psutil.Process]:
    """Every process that a run started."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def assert_gone(processes: Sequence[psutil.Process], within_s: float = 60.0) -> None:
    """All of them end by themselves in that time."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [p.cmdline() for p in alive]


def kill_when(condition: Callable[[], object], what: str, arguments: Sequence[str], cwd: Path) -> None:
    """Starts a command, ends it by signal 9 as soon as something is true, and sees that nothing of it is left."""
    process = subprocess.Popen(
        command(*arguments), cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    others: list[psutil.Process] = []
    try:
        wait_for(condition, what)
        others = descendants(process.pid)
    finally:
        process.kill()
        process.wait()
    assert_gone(others)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 240.0) -> None:
    """Polls a function until it is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timed out waiting for {what}"
        time.sleep(0.005)
