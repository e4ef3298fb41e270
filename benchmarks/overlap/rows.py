"""What runs came to, beside the bound of what overlap can gain and what the simulator says of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from benchmarks.overlap.runs import LOADS, PARTS, SHORT, STEPS, WARM, Load, run, taken_ms
from rlsdk.cli.preparation.plan_schedule import devices_of_run
from rlsdk.planning.measured import measured_rates, read_steps
from rlsdk.planning.rates import Setting
from rlsdk.planning.simulation import simulate
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.trainer.tracking.pool_times import FILE, read_times
from rlsdk.trainer.tracking.trackers import read_metrics
from rlsdk.views.pool_chart import levels, spans

SYNCHRONOUS = "synchronous"
WINDOW = 3
"""Steps."""
SIMULATED = 100
"""Steps."""
CUT = 0.1
"""Of the windows, at each end."""
STALE = ("--schedule.max_staleness", "1")
ONWARDS = ("--schedule.max_staleness", "2", "--schedule.order", "finish", "--schedule.on_new_weights", "recompute",
           "--rollout.concurrency", "fixed")  # fmt: skip


@dataclass(kw_only=True)
class Measured:
    """One schedule of one load; seconds of a step are means over the steps that were measured of all its runs."""

    load: str
    schedule: str
    step_s: float
    """See `settled`."""
    simulated_s: float
    """With rates of the synchronous runs."""
    spread: float = 0.0
    """Between its runs: largest over smallest step, less 1."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of synchronous runs: rollout, update and sync."""
    bound: float = 0.0
    gain: float = 0.0
    longer_half: float = 0.0
    """See `longer_half`."""
    idle: dict[str, float] = field(default_factory=dict)
    taken_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """See `Watch.taken_ms`."""
    busy_machine: float = 0.0
    """Load of the machine when the rows were made."""

    @property
    def off(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_s / self.step_s - 1

    @property
    def reached(self) -> float | None:
        """Of the bound; None of a synchronous run."""
        return None if self.schedule == SYNCHRONOUS else self.gain / self.bound


def schedules(name: str) -> Sequence[Sequence[str]]:
    """Arguments of each schedule of a load; the synchronous one comes first."""
    return ((), STALE, ONWARDS) if name == f"balanced{SHORT}" else ((), STALE)


def folder_of(folder: Path, name: str, extra: Sequence[str], time: int) -> Path:
    """Of one run: of this load and schedule, so many times."""
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}_{_staleness(extra)}_{time}"


def run_all(model: Path, folder: Path, name: str, time: int) -> None:
    """The runs of a load, one after the other: what the machine does meanwhile is as much in the one as in the
    others."""
    for extra in schedules(name):
        spares = bool(extra) and spares_rollout(folder, name)
        run(model, folder_of(folder, name, extra, time), LOADS[name], extra, spares_rollout=spares)


def rows_of(folder: Path, names: Sequence[str], times: int) -> list[Measured]:
    """What all runs came to."""
    bases = {name: [folder_of(folder, name, (), time) for time in range(times)] for name in names}
    rows = []
    for name in names:
        # A decoding step over longer rows takes longer: what a further sample adds is seen in runs of such steps.
        same = [other for other in names if other != name and other.endswith(SHORT) == name.endswith(SHORT)]
        others = [base for other in same for base in bases[other]]
        plain = synchronous(name, bases[name], others)
        rows.append(plain)
        for extra in schedules(name)[1:]:
            runs = [folder_of(folder, name, extra, time) for time in range(times)]
            own_core = spares_rollout(folder, name)
            simulated_s = mean(simulated(base, others, LOADS[name], extra, own_core=own_core) for base in bases[name])
            rows.append(overlapping(name, runs, extra, plain, simulated_s))
    return rows


def spares_rollout(folder: Path, name: str) -> bool:
    """Whether the rollout is the longer half, in the first synchronous run of a load."""
    parts = parts_of(folder_of(folder, name, (), 0))
    return parts["rollout"] >= parts["update"] + parts["sync"]


def parts_of(folder: Path) -> dict[str, float]:
    """Seconds of a synchronous step."""
    metrics = measured_steps(folder)
    rollout = mean(m["time/rollout_s"] + m.get("time/reward_s", 0.0) for m in metrics)
    sync = mean(m.get("time/sync_s", 0.0) for m in metrics)
    return {"rollout": rollout, "update": mean(windows(folder)) - rollout - sync, "sync": sync}


def measured_steps(folder: Path) -> list[dict[str, float]]:
    """Their metrics."""
    return [m for m in read_metrics(folder) if WARM < m["step"] <= STEPS]


def windows(folder: Path) -> list[float]:
    """Seconds of a step, from the end of one update to the next, all that passes: by window of some steps. In one that
    is shorter, a step that waits and one that finds its groups made do not come to their average."""
    _, updates = read_steps(folder / FOLDER)
    return [(updates[at + WINDOW] - updates[at]) / WINDOW for at in range(WARM, STEPS, WINDOW)]


def settled(folders: Sequence[Path]) -> float:
    """Seconds of a step: mean over the windows of all runs, but for one in ten at each end, in which something else
    may have had the machine."""
    found = sorted(seconds for folder in folders for seconds in windows(folder))
    cut = round(len(found) * CUT)
    return mean(found[cut : len(found) - cut])


def spread(folders: Sequence[Path]) -> float:
    """Largest over smallest of the runs' own figures, less 1."""
    found = [settled([folder]) for folder in folders]
    return max(found) / min(found) - 1


def longer_half(folder: Path) -> float:
    """Of each step's time, what its longer half took: training, or making groups and bringing weights. Both halves are
    measured in the overlapping run itself, so that what they lose to each other and to other programs is in them."""
    moments = read_times(folder / FILE, last_steps=STEPS - WARM)
    counts = list(levels(moments))
    making = [(at, after) for (at, running), (after, _) in pairwise(counts) if running]
    busy = making + [(begin, end) for begin, end, _ in spans(moments, "publish", "served")]
    whole = longer = 0.0
    for (begin, end, _), (following, _, _) in pairwise(spans(moments, "train", "trained")):
        whole += following - begin
        longer += max(end - begin, _covered(busy, begin, following))
    return longer / whole


def _covered(busy: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between two times that lie in any of the spans."""
    total, upto = 0.0, begin
    for first, last in sorted(busy):
        start, stop = max(first, upto), min(last, end)
        if stop > start:
            total, upto = total + stop - start, stop
    return total


def synchronous(name: str, folders: Sequence[Path], others: Sequence[Path]) -> Measured:
    """`others`: synchronous runs of other loads."""
    found = [parts_of(folder) for folder in folders]
    step_s = settled(folders)
    rollout, sync = (mean(parts[part] for parts in found) for part in ("rollout", "sync"))
    update = step_s - rollout - sync
    return Measured(
        load=name,
        schedule=SYNCHRONOUS,
        step_s=step_s,
        simulated_s=mean(simulated(folder, others, LOADS[name], ()) for folder in folders),
        spread=spread(folders),
        parts={"rollout": rollout, "update": update, "sync": sync},
        bound=step_s / max(rollout, update + sync),
        gain=1.0,
        taken_ms=taken(folders),
        busy_machine=os.getloadavg()[0],
    )


def overlapping(
    name: str, folders: Sequence[Path], extra: Sequence[str], plain: Measured, simulated_s: float
) -> Measured:
    metrics = [m for folder in folders for m in measured_steps(folder)]
    step_s = settled(folders)
    return Measured(
        load=name,
        schedule="one step off" if extra == STALE else "two steps off, recompute, finish",
        step_s=step_s,
        simulated_s=simulated_s,
        spread=spread(folders),
        bound=plain.bound,
        gain=plain.step_s / step_s,
        longer_half=mean(map(longer_half, folders)),
        taken_ms=taken(folders),
        idle={pool: median(m[f"time/{pool}_idle_share"] for m in metrics) for pool in ("train", "rollout")},
        busy_machine=os.getloadavg()[0],
    )


def taken(folders: Sequence[Path]) -> dict[str, dict[str, float]]:
    """`taken_ms` on the average of runs."""
    found = [taken_ms(folder) for folder in folders]
    return {
        part: {what: mean(one[part][what] for one in found) for what in ("cpu", "queued")}
        for part in PARTS
        if all(part in one for one in found)
    }


def simulated(base: Path, others: Sequence[Path], load: Load, extra: Sequence[str], *, own_core: bool = False) -> float:
    """Seconds of a step by simulation, with rates of a synchronous run, and of those of other loads. `own_core`: the
    rollout shares its core with nobody."""
    rates, lengths = measured_rates(base, read_metrics(base), devices_of_run(base), others)
    if own_core:  # what the controller needs of training's core is in the seconds of an update
        rates = replace(rates, controller_s=0.0)
    return simulate(setting_of(load, extra), rates, lengths, steps=SIMULATED).step_s


def _staleness(extra: Sequence[str]) -> int:
    return int(extra[1]) if extra else 0


def setting_of(load: Load, extra: Sequence[str]) -> Setting:
    return Setting(
        train_devices=1,
        rollout_devices=1,
        groups_per_step=load.prompts,
        samples_per_group=load.samples,
        max_staleness=_staleness(extra),
        partial="recompute" in extra,
    )
