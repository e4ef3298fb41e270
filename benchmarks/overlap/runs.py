"""Real runs of two pools, a core each, and what their processes took of the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlsdk.planning.measured import read_steps
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.trainer.tracking.trackers import read_metrics

REWARD = Path(__file__).parents[1] / "digits.py"
STEPS, WARM = 34, 4
"""Up to which is measured, and those at the beginning that are not."""
TAIL = 3
"""Steps behind them: towards its end a run has nothing left to make."""
PARTS = ("train", "rollout", "controller")
TAKEN = "taken.json"
"""File of a run's folder: what `Watch` saw."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step is made of."""

    prompts: int
    samples: int
    tokens: int
    """Of a response, at most."""

    @property
    def flags(self) -> list[str]:
        return [
            "--trainer.prompts_per_step", str(self.prompts), "--trainer.samples_per_prompt", str(self.samples),
            "--rollout.max_response_tokens", str(self.tokens),
        ]  # fmt: skip


SHORT = ", short steps"
"""Of a load's name: what the controller needs of a step is a fifth of it, and not a twentieth."""
LOADS = {
    "balanced": Load(prompts=4, samples=6, tokens=300),
    "rollout is longer": Load(prompts=2, samples=4, tokens=400),
    "update is longer": Load(prompts=4, samples=12, tokens=150),
    f"balanced{SHORT}": Load(prompts=4, samples=6, tokens=80),
    f"rollout is longer{SHORT}": Load(prompts=2, samples=2, tokens=320),
    f"update is longer{SHORT}": Load(prompts=4, samples=12, tokens=64),
}


def command(model: Path, folder: Path, load: Load, extra: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "rlsdk.cli", "train", "--model", str(model), "--data", "reasoning_gym:chain_sum",
        "--data.options", "{size: 2000, seed: 1, max_terms: 2, max_digits: 1}",
        "--reward", f"{REWARD}:share_of_digits",
        "--data.max_prompt_tokens", "96", "--placement.preset", "disaggregated", "--placement.devices_per_node", "2",
        "--placement.device", "cpu", "--eval.every_steps", "null",
        "--tracking.trackers", "[jsonl]", "--trainer.save_every_steps", "null", "--schedule.journal", "all",
        "--trainer.steps", str(STEPS + TAIL), "--trainer.resume", "never",
        # The sampler's log-probs in the ratio: stale steps do the same work as synchronous ones.
        "--algorithm.old_log_probs", "rollout", "--algorithm.skip_zero_advantage", "false",
        "--trainer.run_dir", str(folder.parent), "--trainer.run_name", folder.name, *load.flags, *extra,
    ]  # fmt: skip


def run(model: Path, folder: Path, load: Load, extra: Sequence[str], *, spares_rollout: bool = False) -> None:
    """One run, its two workers held to two cores. One that is there already is not made again.

    Args:
        model: a folder.
        folder: of the run.
        load: of a step.
        extra: arguments of the schedule.
        spares_rollout: the controller, Ray's daemons and graders are held to training's core, which waits for the
            controller anyway; otherwise the kernel puts them where there is time.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    if STEPS + TAIL in read_steps(folder / FOLDER)[1]:
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command(model, folder, load, extra), stdout=said, stderr=said, env=environment)
        watch = Watch(process, folder, spares_rollout=spares_rollout)
        watching = threading.Thread(target=watch.run, daemon=True)
        watching.start()
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        watching.join()
        if code:
            said.seek(0)
            raise RuntimeError(f"the run failed ({code}):\n{said.read()[-4000:]}")
    (folder / TAKEN).write_text(json.dumps(watch.taken_ms(), indent=1) + "\n", encoding="utf-8")


def taken_ms(folder: Path) -> dict[str, dict[str, float]]:
    """What `Watch` saw of a run; empty where nothing was seen."""
    file = folder / TAKEN
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


class Watch:
    """Holds processes of a run to their cores as long as it goes on, and adds up their time there, and in the queue."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, *, spares_rollout: bool) -> None:
        self._process = process
        self._folder = folder
        self._spares_rollout = spares_rollout
        self._parts: dict[psutil.Process, str] = {}
        self._known: dict[int, tuple[str, float, float]] = {}
        """By process: its part, and seconds on a core and in a queue."""
        self._first: tuple[int, dict[str, tuple[float, float]]] | None = None
        self._last: tuple[int, dict[str, tuple[float, float]]] | None = None

    def run(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        while self._process.poll() is None:
            with suppress(psutil.Error, OSError):  # one has ended meanwhile
                self._look({"train": {cores[0]}, "rollout": {cores[1 % len(cores)]}})
            # What this process takes, it takes from the pools.
            time.sleep(0.5 if self._first is None else 2.0)

    def taken_ms(self) -> dict[str, dict[str, float]]:
        """By part, milliseconds a step: `cpu`, and `queued` where a thread could have run and its core was taken."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return {}
        steps = self._last[0] - self._first[0]
        found = {}
        for part in PARTS:
            before, after = self._first[1][part], self._last[1][part]
            cpu, queued = (1e3 * (b - a) / steps for a, b in zip(before, after, strict=True))
            found[part] = {"cpu": cpu, "queued": queued}
        return found

    def _look(self, cores: dict[str, set[int]]) -> None:
        if self._first is None:
            self._find(cores)
        for process, part in self._parts.items():
            with suppress(psutil.Error, OSError):
                used = process.cpu_times()
                _, _, queued = self._known.get(process.pid, ("", 0.0, 0.0))
                # A thread that has ended takes its time in the queue with it.
                self._known[process.pid] = part, used.user + used.system, max(queued, _queued_s(process))
        steps = len(read_metrics(self._folder)) if self._folder.is_dir() else 0
        if WARM <= steps < STEPS:  # afterwards processes end
            self._last = steps, self._sums()
            self._first = self._first or self._last

    def _find(self, cores: dict[str, set[int]]) -> None:
        """Threads and processes that these start are held where they are."""
        whole = psutil.Process(self._process.pid)
        for process in [whole, *whole.children(recursive=True)]:
            part = self._parts[process] = self._part_of(process)
            if part != "controller":
                _hold(process, cores[part])
            elif self._spares_rollout:
                _hold(process, cores["train"])

    def _sums(self) -> dict[str, tuple[float, float]]:
        found = dict.fromkeys(PARTS, (0.0, 0.0))
        for part, cpu, queued in self._known.values():
            found[part] = found[part][0] + cpu, found[part][1] + queued
        return found

    def _part_of(self, process: psutil.Process) -> str:
        """Workers by the log that they write, `POOL-DEVICE.log`."""
        with suppress(OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent.name == "logs" and log.stem == "rollout-0":
                return "rollout"
            if log.parent.name == "logs" and log.suffix == ".log" and log.stem.endswith("-0"):
                return "train"
        return "controller"


def _hold(process: psutil.Process, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{process.pid}/task"):
        with suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


def _queued_s(process: psutil.Process) -> float:
    """Of threads that live: in the queue of a core."""
    total = 0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9
