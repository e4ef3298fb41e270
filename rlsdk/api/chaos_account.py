"""What faults have cost a run, counted from its journal, its metrics and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlsdk.api.chaos_run import ChaosRun

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


@dataclass(kw_only=True)
class Outcome:
    """What became of a run when a fault struck it, until the next one did."""

    fault: str
    run: str = ""
    """Name of the run that it struck."""
    step: int = 0
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
    updates: int = 0
    """Updates that had been made before it struck, repeated ones included."""

    @property
    def cost(self) -> str:
        """What must not be, in words; empty where nothing was lost."""
        counts = {"prompts lost": self.prompts_lost, "trained twice": self.trained_twice}
        return "; ".join([*(f"{count} {name}" for name, count in counts.items() if count), *self.wrong])


def account(run: ChaosRun, whole: ChaosRun, outcomes: Sequence[Outcome]) -> None:
    """Fills in what each of the faults that struck a run has cost it: a step counts to the last fault before it."""
    from rlsdk.trainer.checkpoint import CheckpointStore, damage

    struck = [outcome for outcome in outcomes if outcome.struck]
    if not struck:
        return
    _count_updates(run.updates(), struck)
    _count_prompts(run, whole, struck)
    for outcome in struck:
        outcome.difference = 0.0
    for step, difference in differences(run.run_dir, whole.run_dir).items():
        outcome = last_before(step, struck)
        outcome.difference = max(outcome.difference, difference)
    newest = CheckpointStore(run.run_dir / "checkpoints", keep=1).newest()
    struck[-1].wrong += [f"checkpoint: {what}" for what in damage(newest)] if newest is not None else []


def last_before(step: int, struck: Sequence[Outcome]) -> Outcome:
    """The fault that struck last before this step was trained; the first one for the steps before all."""
    return next((outcome for outcome in reversed(struck) if outcome.step < step), struck[0])


def _count_updates(updates: Sequence[int], struck: Sequence[Outcome]) -> None:
    ends = [*(outcome.updates for outcome in struck[1:]), len(updates)]
    for outcome, end in zip(struck, ends, strict=True):
        seen = set(updates[: outcome.updates])
        for step in updates[outcome.updates : end]:
            outcome.steps_again += step in seen
            seen.add(step)


def _count_prompts(run: ChaosRun, whole: ChaosRun, struck: Sequence[Outcome]) -> None:
    mine, theirs = _steps_of_groups(run), _steps_of_groups(whole)
    for group in theirs.keys() - mine.keys():
        last_before(min(theirs[group]), struck).prompts_lost += 1
    for steps in mine.values():
        if len(steps) > 1:
            last_before(max(steps), struck).trained_twice += 1


def _steps_of_groups(run: ChaosRun) -> dict[int, set[int]]:
    """Of each group: the steps that it was trained in."""
    found: dict[int, set[int]] = {}
    for line in run.journal():
        if line["event"] == "update":
            for group in line["groups"]:
                found.setdefault(int(group), set()).add(int(line["step"]))
    return found


def differences(mine: Path, theirs: Path) -> dict[int, float]:
    """Largest relative difference, by step, of the metrics that do not depend on the clock; infinite where one is
    missing. Steps without a difference are left out."""
    from rlsdk.trainer.trackers import read_metrics

    found, expected = (
        {int(line["step"]): line for line in read_metrics(folder) if any(name.startswith("policy/") for name in line)}
        for folder in (mine, theirs)
    )
    largest: dict[int, float] = {}
    for step in found.keys() | expected.keys():
        one, other = found.get(step, {}), expected.get(step, {})
        for name in one.keys() | other.keys():
            if name.startswith(CLOCK):
                continue
            a, b = one.get(name, math.nan), other.get(name, math.nan)
            if a != b:
                missing = math.isnan(a) or math.isnan(b)
                difference = math.inf if missing else abs(a - b) / max(abs(a), abs(b))
                largest[step] = max(largest.get(step, 0.0), difference)
    return largest
