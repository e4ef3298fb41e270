"""Computes the cost of faults in a run from its journal, its metrics and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlsdk.chaos.run import ChaosRun
from rlsdk.rollouts.journal.inspection import inspect_journal
from rlsdk.system.files import read_regular_text

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
"""Prefixes of metrics of durations and of faults, which are not compared."""
MOST_NAMED = 4
"""Most metrics that a message names."""
RELATIVE, ABSOLUTE = 1e-2, 1e-5
"""Metrics that differ by more are different, and not only rounded differently: which samples share a decoding step, and
so the last digits of results, may change after a fault."""


@dataclass(kw_only=True)
class Outcome:
    """Effect of a fault on a run, until the next fault."""

    fault: str
    run: str = ""
    """Name of the run."""
    step: int = 0
    """Steps trained before the fault."""
    struck: bool = False
    """False: the moment did not occur, so nothing was tested."""
    prompts_lost: int = 0
    trained_twice: int = 0
    steps_again: int = 0
    """Number of updates that were repeated."""
    detect_s: float | None = None
    """Seconds until the run reported the fault, or ended."""
    recover_s: float | None = None
    """Seconds until the next update of a step was done."""
    commands: int = 1
    """Number of times that the command was run: 1 if the run continued by itself."""
    difference: float = math.inf
    """Largest relative difference of a metric from the undisturbed run's."""
    wrong: list[str] = field(default_factory=list)
    updates: int = 0
    """Updates made before the fault, including repeated ones."""

    @property
    def cost(self) -> str:
        """Description of what was lost; empty if nothing was."""
        counts = {"prompts lost": self.prompts_lost, "trained twice": self.trained_twice}
        return "; ".join([*(f"{count} {name}" for name, count in counts.items() if count), *self.wrong])


def account(run: ChaosRun, whole: ChaosRun, outcomes: Sequence[Outcome], *, is_over: bool = True) -> None:
    """Computes the cost of each fault of a run: a step counts to the last fault before it. Until the run `is_over`,
    only trained steps are counted, and its checkpoints are not checked."""
    from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, damage

    struck = [outcome for outcome in outcomes if outcome.struck]
    if not struck:
        return
    for outcome in struck:
        outcome.steps_again = outcome.prompts_lost = outcome.trained_twice = 0
        outcome.difference = 0.0
    _count_updates(run.updates(), struck)
    _count_prompts(run, whole, struck, is_over=is_over)
    for step, difference in differences(run.run_dir, whole.run_dir, is_over=is_over).items():
        outcome = last_before(step, struck)
        outcome.difference = max(outcome.difference, difference)
    if not is_over:
        return
    if promises_equal_numbers(whole.run_dir):
        for step, names in changed_metrics(run.run_dir, whole.run_dir).items():
            last_before(step, struck).wrong.append(f"step {step}: other metrics: {', '.join(names[:MOST_NAMED])}")
    newest = CheckpointStore(run.run_dir / "checkpoints", keep=1).newest()
    struck[-1].wrong += [f"checkpoint: {what}" for what in damage(newest)] if newest is not None else []


def token_problems(run: ChaosRun) -> Sequence[str]:
    """What in the journal of a run that is over does not account for its tokens.

    Raises:
        CheckpointError: the journal is damaged.
    """
    found = inspect_journal(run.run_dir / "journal")
    return [f"tokens: {each}" for each in (*found.problems, *(one for step in found.steps for one in step.problems))]


def last_before(step: int, struck: Sequence[Outcome]) -> Outcome:
    """The last fault before this step was trained; for earlier steps the first fault."""
    return next((outcome for outcome in reversed(struck) if outcome.step < step), struck[0])


def _count_updates(updates: Sequence[int], struck: Sequence[Outcome]) -> None:
    ends = [*(outcome.updates for outcome in struck[1:]), len(updates)]
    for outcome, end in zip(struck, ends, strict=True):
        seen = set(updates[: outcome.updates])
        for step in updates[outcome.updates : end]:
            outcome.steps_again += step in seen
            seen.add(step)


def _count_prompts(run: ChaosRun, whole: ChaosRun, struck: Sequence[Outcome], *, is_over: bool) -> None:
    mine, theirs = _steps_of_groups(run), _steps_of_groups(whole)
    last = math.inf if is_over else max(run.updates(), default=0)
    under_way = (
        set() if is_over else {int(g) for line in run.journal() if line["event"] == "start" for g in line["groups"]}
    )
    for group in theirs.keys() - mine.keys() - under_way:
        if min(theirs[group]) <= last:
            last_before(min(theirs[group]), struck).prompts_lost += 1
    for steps in mine.values():
        if len(steps) > 1:
            last_before(max(steps), struck).trained_twice += 1


def _steps_of_groups(run: ChaosRun) -> dict[int, set[int]]:
    """For each group, the steps that trained on it."""
    found: dict[int, set[int]] = {}
    for line in run.journal():
        if line["event"] == "update":
            for group in line["groups"]:
                found.setdefault(int(group), set()).add(int(line["step"]))
    return found


def promises_equal_numbers(run_dir: Path) -> bool:
    """Whether faults must not change any number of this run except by float32 rounding: each step trains on its own
    single-turn prompts, with weights that only the schedule decides (docs/schedules.md, "What is certain")."""
    import yaml

    file = run_dir / "config.yaml"
    if not file.exists():
        return False
    config = yaml.safe_load(read_regular_text(file))
    schedule, rollout = config["schedule"], config["rollout"]
    return bool(
        schedule["order"] == "prompt"
        and schedule["on_new_weights"] == "drain"
        and rollout["rollouter"] == "single_turn"
        and not any(rollout.get(maker) for maker in ("environment", "agent", "command"))
        and not config["algorithm"]["dynamic_sampling"]["enabled"]
        and config["model"]["dtype"] == "float32"
    )


def changed_metrics(mine: Path, theirs: Path) -> dict[int, list[str]]:
    """The first step with metrics that are missing or differ by more than rounding, and their names; empty if there is
    none. All later steps follow from it."""
    found, expected = _metrics(mine), _metrics(theirs)
    for step in sorted(found.keys() | expected.keys()):
        one, other = found.get(step, {}), expected.get(step, {})
        names = [name for name in sorted((one.keys() | other.keys()) - {"step"}) if not name.startswith(CLOCK)]
        changed = [name for name in names if not _is_equal(one.get(name), other.get(name))]
        if changed:
            return {step: changed}
    return {}


def _is_equal(one: float | None, other: float | None) -> bool:
    """Whether values are equal except for rounding; NaN equals NaN, and a missing metric equals none."""
    if one is None or other is None:
        return False
    return (
        one == other or (one != one and other != other) or math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    )


def _metrics(folder: Path) -> dict[int, Mapping[str, float]]:
    """Metrics by step, of the steps that trained."""
    from rlsdk.trainer.tracking.trackers import read_metrics

    return {
        int(line["step"]): line for line in read_metrics(folder) if any(name.startswith("policy/") for name in line)
    }


def differences(mine: Path, theirs: Path, *, is_over: bool = True) -> dict[int, float]:
    """Largest relative difference by step of the metrics that do not depend on the clock; infinite if one is missing.
    Steps without difference are left out, and, before the run is over, steps that are still missing."""
    found, expected = _metrics(mine), _metrics(theirs)
    largest: dict[int, float] = {}
    last = math.inf if is_over else max(found, default=0)
    for step in sorted(step for step in found.keys() | expected.keys() if step <= last):
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
