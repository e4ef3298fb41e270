"""Faults on real runs: processes of a command that trains are killed; what that cost is counted from its journal."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlsdk.interfaces import ConfigError, nearest

MOMENTS = ("rollout", "reward", "update", "sync", "save", "restart")
"""rollout: groups are under way; reward: a grader is at work; update: a step trains; sync: weights are on their way;
save: a checkpoint is written; restart: what a first fault has ended is coming back."""
PROCESSES = ("controller", "grader", "raylet", "gcs")
"""What can be killed besides the processes of a role."""
CLOCK = (
    "time/",
    "throughput/",
    "rewards/graded_again",
    "memory/",
    "faults/",
    "unix_time",
    "sync/",
    "rollout/concurrency",
)
"""Beginnings of the metrics that say how long it took, or that a fault happened."""
LOOK_S = 0.005
END_S = 600.0
"""For a run to come to its end, or to a moment."""
_NOTICED = ("was lost", "graded again", "error:")
_BACK = ("serves again", "resumed from", "lost for good")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A process that is killed, and when."""

    role: str
    moment: str

    @classmethod
    def parse(cls, text: str, roles: Sequence[str]) -> Fault:
        """Reads `ROLE@MOMENT`.

        Raises:
            ConfigError: no such role or moment.
        """
        role, _, moment = text.partition("@")
        known = [*roles, *PROCESSES]
        if role not in known:
            raise ConfigError(f"--kill {text!r}: {role!r} is no process of this run{nearest(role, known)}; has {known}")
        if moment not in MOMENTS:
            raise ConfigError(f"--kill {text!r}: expected ROLE@MOMENT with a moment of {list(MOMENTS)}")
        return cls(role=role, moment=moment)

    def __str__(self) -> str:
        return f"{self.role}@{self.moment}"


@dataclass(kw_only=True)
class Outcome:
    """What became of a run that a fault struck."""

    fault: str
    step: int
    """Steps that were trained before it struck."""
    struck: bool = False
    """False: the moment did not come, which says nothing."""
    prompts_lost: int = 0
    trained_twice: int = 0
    steps_again: int = 0
    """Updates that were made again."""
    detect_s: float | None = None
    """Until the run said so, or ended."""
    recover_s: float | None = None
    """Until the next update of a step was done."""
    commands: int = 1
    """Times that the command was given: 1 where the run went on by itself."""
    difference: float = math.inf
    """Largest relative difference of a metric from the undisturbed run's."""
    wrong: list[str] = field(default_factory=list)


class ChaosRun:
    """One run of `rlsdk train`, as a process that may be struck."""

    def __init__(self, arguments: Sequence[str], folder: Path, name: str, pools: Mapping[str, str]) -> None:
        """`pools`: of each role, which the files of its processes' output are named by."""
        self.run_dir = folder / name
        self.output = folder / f"{name}.txt"
        self._command = [
            sys.executable, "-m", "rlsdk.cli", "train", *arguments, "--trainer.run_dir", str(folder),
            "--trainer.run_name", name, "--schedule.journal", "all", "--trainer.resume", "auto",
        ]  # fmt: skip
        self._pools = pools
        self.family: set[psutil.Process] = set()
        self.commands = 0
        self._characters: dict[int, tuple[int, int]] = {}
        """Of each grader by its number: read and written, when they were last looked at."""
        self._grading: set[int] = set()

    def start(self) -> None:
        """Starts, or resumes what is there."""
        self.commands += 1
        with self.output.open("a", encoding="utf-8") as output:
            self.process = subprocess.Popen(self._command, stdout=output, stderr=output, start_new_session=True)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def journal(self) -> list[Mapping[str, Any]]:
        from rlsdk.rollouts.journal import lines

        return list(lines(self.run_dir / "journal"))

    def updates(self) -> list[int]:
        """Steps in the order in which they were trained, repeated ones included."""
        return [int(line["step"]) for line in self.journal() if line["event"] == "update"]

    def moments(self) -> set[str]:
        """Those that it is in now, but for `reward`."""
        found, journal = set(), self.journal()
        steps: dict[str, list[int]] = {"train": [], "update": [-1], "publish": [-1]}
        started, trained = set[int](), set[int]()
        for line in journal:
            event = line["event"]
            if event in steps:
                steps[event].append(int(line["step"]))
            if event == "start":
                started.update(line["groups"])
            elif event == "train":
                trained.update(line["groups"])
        found |= {"rollout"} if started - trained else set()
        found |= {"update"} if len(steps["train"]) > len(steps["update"]) - 1 else set()
        found |= {"sync"} if steps["update"][-1] > steps["publish"][-1] else set()
        found |= {"save"} if any((self.run_dir / "checkpoints").glob(".step_*.tmp")) else set()
        text = self.text()
        begun, back = text.rfind("is started again"), max(map(text.rfind, _BACK))
        return found | ({"restart"} if begun > back else set())

    def is_in(self, moment: str) -> bool:
        return self._is_grading() if moment == "reward" else moment in self.moments()

    def _is_grading(self) -> bool:
        """A grader has read a task, and has written nothing since."""
        graders = self.processes("grader")
        for grader in graders:
            with suppress(psutil.Error):
                counts = grader.io_counters()
                now = (counts.read_chars, counts.write_chars)
                read, written = self._characters.setdefault(grader.pid, now)
                self._characters[grader.pid] = now
                if now[1] > written:
                    self._grading.discard(grader.pid)
                elif now[0] > read:
                    self._grading.add(grader.pid)
        return any(grader.pid in self._grading for grader in graders)

    def processes(self, role: str) -> list[psutil.Process]:
        """Those of a role, or of what it is called."""
        found = []
        with suppress(psutil.Error):
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))
        if role == "controller":
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        for process in self.family:
            with suppress(psutil.Error, OSError):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and self._is(process, role):
                    found.append(process)
        return found

    def _is(self, process: psutil.Process, role: str) -> bool:
        if role == "grader":
            return any("rewards/child" in part or "rlsdk.rewards" in part for part in process.cmdline())
        if role in PROCESSES:
            return process.name() == {"gcs": "gcs_server"}.get(role, role)
        output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        return output.parent == self.run_dir / "logs" and output.stem.startswith(f"{self._pools[role]}-")

    def wait(self, condition: Callable[[], object], timeout_s: float = END_S) -> bool:
        """Until it is true; False where the run ended, or that took too long."""
        end = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True

    def end(self) -> list[str]:
        """Ends what is left; what had outlived the run by 20 s."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(list(self.family), timeout=20)
        left = []
        for process in alive:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"left behind: {' '.join(process.cmdline())[:80]}")
                    process.kill()
        return left


def strike(run: ChaosRun, fault: Fault, whole: ChaosRun, chance: random.Random) -> Outcome:
    """Starts a run, kills a process of it at the moment, has it come to its end, and compares it with the undisturbed
    one."""
    steps = max(whole.updates())
    outcome = Outcome(fault=str(fault), step=chance.randint(1, max(1, steps - 2)))
    run.start()
    try:
        if run.wait(lambda: len(run.updates()) >= outcome.step):
            _make_it_happen(run, fault, outcome, chance)
        _to_the_end(run, outcome)
    finally:
        outcome.wrong += run.end()
    outcome.commands = run.commands
    if outcome.struck:
        _account(run, whole, outcome)
    return outcome


def _make_it_happen(run: ChaosRun, fault: Fault, outcome: Outcome, chance: random.Random) -> None:
    if fault.moment == "restart":
        first = fault.role if fault.role not in ("controller", "grader") else "actor"
        _kill(run, first, "rollout", chance)
    text = len(run.text())
    if not _kill(run, fault.role, fault.moment, chance):
        return
    outcome.struck, began, done = True, time.monotonic(), len(run.updates())
    while outcome.recover_s is None and time.monotonic() - began < END_S:
        seconds, ended = time.monotonic() - began, run.process.poll() is not None
        said = run.text()[text:]
        if outcome.detect_s is None and (ended or any(word in said for word in _NOTICED)):
            outcome.detect_s = seconds
        if len(run.updates()) > done:
            outcome.recover_s = seconds
        elif ended and run.process.returncode == 0:
            return
        elif ended:
            run.start()
        time.sleep(LOOK_S)


def _kill(run: ChaosRun, role: str, moment: str, chance: random.Random) -> bool:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = run.processes(role) if run.is_in(moment) else []
        return bool(found)

    if not run.wait(is_there):
        return False
    try:
        chance.choice(sorted(found, key=lambda process: process.pid)).kill()
    except psutil.Error:
        return False
    return True


def _to_the_end(run: ChaosRun, outcome: Outcome) -> None:
    """Gives the same command again as long as it gets on."""
    for _ in range(3):
        run.wait(lambda: False)
        if run.process.poll() == 0:
            return
        if run.process.poll() is None:
            outcome.wrong.append(f"did not end within {END_S:g} s")
            return
        run.start()
    outcome.wrong.append(f"ended with {run.process.poll()}")


def _account(run: ChaosRun, whole: ChaosRun, outcome: Outcome) -> None:
    from rlsdk.rollouts.journal import account

    trained = Counter(run.updates())
    outcome.steps_again = sum(trained.values()) - len(trained)
    step_of: dict[int, set[int]] = {}
    for line in run.journal():
        if line["event"] == "update":
            for group in line["groups"]:
                step_of.setdefault(int(group), set()).add(int(line["step"]))
    outcome.trained_twice = sum(len(steps) > 1 for steps in step_of.values())
    expected = {group for group, fate in account(whole.run_dir / "journal").items() if fate.startswith("trained")}
    outcome.prompts_lost = len(expected - step_of.keys())
    outcome.difference = max(differences(run.run_dir, whole.run_dir), default=0.0)


def differences(mine: Path, theirs: Path) -> Iterator[float]:
    """Relative difference of each metric of each step that does not depend on the clock; infinite where one is
    missing."""
    from rlsdk.trainer.trackers import read_metrics

    found, expected = (
        {int(line["step"]): line for line in read_metrics(folder) if any(name.startswith("policy/") for name in line)}
        for folder in (mine, theirs)
    )
    for step in found.keys() | expected.keys():
        one, other = found.get(step, {}), expected.get(step, {})
        for name in one.keys() | other.keys():
            if name.startswith(CLOCK):
                continue
            a, b = one.get(name, math.nan), other.get(name, math.nan)
            if a != b:
                yield math.inf if math.isnan(a) or math.isnan(b) else abs(a - b) / max(abs(a), abs(b))
