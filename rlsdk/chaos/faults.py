"""Fault injection in real runs: kills processes of a training command one after another, as often as its steps allow,
and computes the cost of each fault from the journal."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from rlsdk.chaos.account import Outcome, account
from rlsdk.chaos.run import END_S, LOOK_S, PROCESSES, PROCESSES_S, ChaosRun
from rlsdk.interfaces import ConfigError, nearest

MOMENTS = ("rollout", "reward", "update", "sync", "save", "restart")
"""rollout: samples are generated; reward: a grader is working; update: a step trains; sync: weights are transferred;
save: a checkpoint is written; restart: what an earlier fault ended is restarting."""
TURN = "turn"
"""Moment of runs with episodes: one of them has a turn and is not finished."""
PATIENCE = 6
"""Number of steps within which the moment must occur while the process exists."""
LAST_STEPS = 2
"""Last steps of a run without faults, so that it can show that it continues."""
STEPS_PER_FAULT = 3
_NOTICED = ("was lost", "graded again", "error:")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A process to kill, and when."""

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
        if moment not in (*MOMENTS, TURN):
            raise ConfigError(f"--kill {text!r}: expected ROLE@MOMENT with a moment of {[*MOMENTS, TURN]}")
        return cls(role=role, moment=moment)

    def __str__(self) -> str:
        return f"{self.role}@{self.moment}"


def strike(
    run: ChaosRun,
    faults: deque[Fault],
    whole: ChaosRun,
    chance: random.Random,
    *,
    most: int = 0,
    has_time: Callable[[], bool] = lambda: True,
    report: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Starts a run, kills a process of it at the moment of each fault, has it come to its end, and compares it with
    the undisturbed one. A fault strikes when the run has made an update since the one before; a replica that was lost
    may still be on its way back.

    Args:
        run: not started yet.
        faults: those to strike, in order; what struck, or whose moment did not come, is taken out of it.
        whole: the undisturbed run, which has come to its end.
        chance: draws steps and processes.
        most: faults of this run; 0: as many as its steps give time for.
        has_time: False: nothing strikes any more.
        report: receives the faults of this run as soon as one is over, the newest last, held against the undisturbed
            run as far as this one has come.
    """
    steps = max(whole.updates())
    most = most or max(1, (steps - LAST_STEPS) // STEPS_PER_FAULT)
    gap = max(1, (steps - LAST_STEPS) // most)
    outcomes: list[Outcome] = []
    try:
        run.start()
        while faults and len(outcomes) < most and (has_time() or not outcomes):
            step = max(run.updates(), default=0) + chance.randint(1, gap)
            if step > max(1, steps - LAST_STEPS) or not _is_there(run, step):
                break
            outcomes.append(Outcome(fault=str(faults[0]), run=run.run_dir.name))
            _make_it_happen(run, faults.popleft(), outcomes[-1], chance)
            outcomes[-1].wrong += run.outlived()
            account(run, whole, outcomes, is_over=False)
            report(outcomes)
        _to_the_end(run, outcomes)
    finally:
        left = run.end()
        if outcomes:
            outcomes[-1].wrong += left
    account(run, whole, outcomes)
    return outcomes


def _is_there(run: ChaosRun, step: int) -> bool:
    """Waits until this step is trained; False if the run ended before."""
    return run.wait(lambda: max(run.updates(), default=0) >= step)


def _make_it_happen(run: ChaosRun, fault: Fault, outcome: Outcome, chance: random.Random) -> None:
    if fault.moment == "restart":
        first = fault.role if fault.role not in ("controller", "grader") else "actor"
        if not _kill(run, first, "rollout", chance):
            return
    text, commands = len(run.text()), run.commands
    outcome.updates = len(run.updates())
    if not _kill(run, fault.role, fault.moment, chance):
        return
    began, updates = time.monotonic(), run.updates()
    outcome.struck, outcome.step = True, max(updates)
    if fault.moment != "restart":
        outcome.updates = len(updates)
    while outcome.recover_s is None and time.monotonic() - began < END_S:
        seconds, ended = time.monotonic() - began, run.process.poll() is not None
        said = run.text()[text:]
        if outcome.detect_s is None and (ended or any(word in said for word in _NOTICED)):
            outcome.detect_s = seconds
        if len(run.updates()) > len(updates):
            outcome.recover_s = seconds
        elif ended and run.process.returncode == 0:
            break
        elif ended:
            run.start()
        time.sleep(LOOK_S)
    outcome.commands += run.commands - commands


def _kill(run: ChaosRun, role: str, moment: str, chance: random.Random) -> bool:
    """Kills the process; False if the moment did not occur within `PATIENCE` steps."""
    last = max(run.updates(), default=0) + PATIENCE

    def is_over() -> bool:
        return run.process.poll() is not None or max(run.updates(), default=0) > last

    end = time.monotonic() + END_S
    while not is_over() and time.monotonic() < end:
        # Some moments last milliseconds, so the process is looked up before.
        found = sorted(run.processes(role), key=lambda process: process.pid)
        if not found:  # it is being restarted
            last = max(run.updates(), default=0) + PATIENCE
        known_until = time.monotonic() + PROCESSES_S
        while found and time.monotonic() < known_until:
            if run.is_in(moment):
                try:
                    chance.choice(found).kill()
                except psutil.Error:
                    break
                return True
            time.sleep(LOOK_S)
        time.sleep(LOOK_S)
    return False


def _to_the_end(run: ChaosRun, outcomes: Sequence[Outcome]) -> None:
    """Repeats the command as long as it makes progress."""
    wrong = outcomes[-1].wrong if outcomes else []
    for _ in range(3):
        run.wait(lambda: False)
        if run.process.poll() == 0:
            return
        if run.process.poll() is None:
            wrong.append(f"did not end within {END_S:g} s")
            return
        run.start()
        if outcomes:
            outcomes[-1].commands += 1
    wrong.append(f"ended with {run.process.poll()}")
