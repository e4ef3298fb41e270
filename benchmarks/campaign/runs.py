"""Small real runs through the command line, and what they come to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlsdk.chaos.account import CLOCK
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, damage
from rlsdk.trainer.tracking.trackers import read_lines, read_metrics

ROOT = Path(__file__).resolve().parents[2]
TASK = (
    "--data", str(ROOT / "tests" / "e2e" / "sums.jsonl"), "--reward", f"{ROOT / 'tests/e2e/digits.py'}:share_of_digits",
    "--data.num_eval_rows", "16", "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "6",
    "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4", "--trainer.updates_per_step", "2",
    "--train.optim.lr", "1e-3", "--train.micro_batch_tokens", "2048", "--tracking.trackers", "[jsonl]",
    "--trainer.save_every_steps", "2", "--trainer.run_name", "run",
)  # fmt: skip
"""Fractions of a second a step."""
END_S = 240.0
"""For a run to end by itself."""


@dataclass
class Run:
    """One run, in a folder of its own."""

    folder: Path
    model: str
    steps: int
    process: subprocess.Popen[str] | None = None
    family: list[psutil.Process] = field(default_factory=list)
    output: str = ""

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "run"

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.run_dir / "checkpoints", keep=3)

    def start(self, extra: Sequence[str] = ()) -> None:
        """Starts, or resumes what is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = ["train", "--model", self.model, *TASK, "--trainer.steps", str(self.steps), *extra]
        with (self.folder / "output.txt").open("a", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlsdk.cli", *arguments],
                cwd=self.folder, stdout=output, stderr=output, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
            )  # fmt: skip

    def finish(self, timeout_s: float = END_S) -> int:
        """Waits for the end; returns the exit code. One that does not end is killed, and counts as -9."""
        assert self.process is not None
        self.look()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.output = (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        return code

    def look(self) -> list[psutil.Process]:
        """The processes that this run has started so far."""
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                if process not in self.family:
                    self.family.append(process)
        return self.family

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Polls until it is true.

        Raises:
            TimeoutError: it did not become true, or the run ended before.
        """
        assert self.process is not None
        end = time.monotonic() + END_S
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError(f"no {what}: {self.folder / 'output.txt'}")
            time.sleep(0.01)

    def steps_logged(self) -> int:
        return sum("reward/mean" in line for line in read_lines(self.run_dir / "metrics.jsonl"))

    def left_behind(self) -> list[str]:
        """Processes that outlive it by 20 s."""
        _, alive = psutil.wait_procs(self.family, timeout=20)
        return [" ".join(p.cmdline())[:80] for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        """Ends what is left of it, so that the next run has the machine."""
        if self.process is not None and self.process.poll() is None:
            self.look()
        for process in [
            *([psutil.Process(self.process.pid)] if self.process and self.process.poll() is None else []),
            *self.family,
        ]:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in read_metrics(run_dir)]


def lost(run: Run, whole: Run) -> list[str]:
    """What a run that went through a fault has not, or has otherwise, than one that did not."""
    mine, theirs = numbers(run.run_dir), numbers(whole.run_dir)
    found = (
        [f"steps {[line['step'] for line in mine]}, expected {[line['step'] for line in theirs]}"]
        if len(mine) != len(theirs)
        else []
    )
    for line, expected in zip(mine, theirs, strict=False):
        found += [
            f"step {line['step']}: {name} is {line.get(name)}, expected {expected.get(name)}"
            for name in sorted(line.keys() | expected.keys())
            if line.get(name) != expected.get(name)
        ]
    samples = [
        {k: s.get(k) for k in ("step", "prompt", "response", "score")}
        for s in read_lines(run.run_dir / "samples.jsonl")
    ]
    wanted = [
        {k: s.get(k) for k in ("step", "prompt", "response", "score")}
        for s in read_lines(whole.run_dir / "samples.jsonl")
    ]
    found += ["samples.jsonl differs"] if samples != wanted else []
    newest = run.store.newest()
    found += [f"checkpoint: {fault}" for fault in (damage(newest) if newest is not None else ["there is none"])]
    return found
