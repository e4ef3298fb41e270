"""Commands of rlsdk as a person types them, each in processes of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rlsdk.trainer.tracking.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[2]
Metrics = Mapping[str, float]


class CommandFailedError(Exception):
    """A command of rlsdk ended with an error."""


def rlsdk(*arguments: str, log: Path, path: Path | None = None, in_process: bool = False) -> None:
    """Runs a command to its end, on one thread.

    Args:
        arguments: what is typed after `rlsdk`.
        log: folder that gets what the command printed, as `log.txt`.
        path: a further folder that Python looks for packages in.
        in_process: without a cluster; not every command.

    Raises:
        CommandFailedError: it did; with the end of its output.
    """
    paths = [str(ROOT), *([] if path is None else [str(path)])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    log.mkdir(parents=True, exist_ok=True)
    with (log / "log.txt").open("w", encoding="utf-8") as out:
        if in_process:
            code = run_forked(arguments, environment, log, out)
        else:
            command = [sys.executable, "-m", "rlsdk.cli", *arguments]
            code = subprocess.run(
                command, env=environment, cwd=log, stdout=out, stderr=subprocess.STDOUT, check=False
            ).returncode
    if code:
        text = (log / "log.txt").read_text(encoding="utf-8")
        raise CommandFailedError(f"rlsdk {' '.join(arguments)} ended with {code}:\n{text[-4000:]}")


def run_forked(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, out: TextIO) -> int | None:
    """Runs a command without a cluster in a fork of this process; returns its exit status.

    The imports, ten seconds of processor time, are made once, in this process. It runs no operation of torch itself, so
    there are no threads that a fork would lose.
    """
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401 - as every command does

    from benchmarks.recipes import in_process

    def command() -> None:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        os.chdir(folder)
        os.environ.update(environment)
        torch.set_num_threads(1)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        in_process.run(arguments)

    child = multiprocessing.get_context("fork").Process(target=command)
    child.start()
    child.join()
    return child.exitcode


def run_steps(run: Path) -> list[Metrics]:
    """Metrics of each step of a run."""
    return [line for line in read_metrics(run) if not line.keys().isdisjoint(("policy/loss", "critic/loss"))]


def run_evaluations(run: Path) -> list[Metrics]:
    """Metrics of each evaluation of a run."""
    return [line for line in read_metrics(run) if any(name.startswith("eval/") for name in line)]


def evaluate(model: Path, flags: list[str], folder: Path, *, in_process: bool) -> Metrics:
    """Figures of a model's folder on the held-out words, by the built-in rollout engine."""
    if in_process:
        run = [*flags, "--trainer.run_dir", str(folder), "--trainer.run_name", f"eval-{model.parent.name}"]
        settings = [
            "--model",
            str(model),
            "--sft.steps",
            "0",
            "--trainer.steps",
            "0",
            "--train.optim.warmup_steps",
            "0",
        ]
        rlsdk("train", *run, *settings, log=folder, in_process=True)
        return run_evaluations(folder / f"eval-{model.parent.name}")[0]
    output, at = folder / "evaluation.json", flags.index("--trainer.run_dir")
    rlsdk("eval", str(model), *flags[:at], *flags[at + 2 :], "--output", str(output), log=folder)
    found: Metrics = json.loads(output.read_text(encoding="utf-8"))
    return found
