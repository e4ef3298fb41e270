"""What runs came to, beside the bound of what overlap can gain and what the simulator says of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from benchmarks.overlap.runs import LOADS, STEPS, WARM, Load, run, taken_ms
from rlsdk.cli.plan_schedule import devices_of_run
from rlsdk.planning.measured import PREFILL_SPEEDUP, fit_decoding, measured_rates, read_steps
from rlsdk.planning.rates import Rates, Setting
from rlsdk.planning.simulation import simulate
from rlsdk.rollouts.journal import FOLDER
from rlsdk.trainer.pool_times import FILE, read_times
from rlsdk.trainer.trackers import read_metrics
from rlsdk.views.pool_chart import levels, spans

SYNCHRONOUS = "synchronous"
STALE = ("--schedule.max_staleness", "1")
ONWARDS = ("--schedule.max_staleness", "2", "--schedule.order", "finish", "--schedule.on_new_weights", "recompute",
           "--rollout.concurrency", "fixed")  # fmt: skip


@dataclass(kw_only=True)
class Measured:
    """One run; seconds of a step are means over those that were measured."""

    load: str
    schedule: str
    step_s: float
    simulated_s: float
    """With rates of the synchronous run."""
    by_itself_s: float
    """Simulated with rates of this run."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of a synchronous run: rollout, update and sync."""
    bound: float = 0.0
    gain: float = 0.0
    longer_half: float = 0.0
    """See `longer_half`."""
    idle: dict[str, float] = field(default_factory=dict)
    taken_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """See `Watch.taken_ms`."""
    busy_machine: float = 0.0
    """Load of the machine when the run ended."""

    @property
    def off(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_s / self.step_s - 1

    @property
    def reached(self) -> float | None:
        """Of the bound; None of a synchronous run."""
        return None if self.schedule == SYNCHRONOUS else self.gain / self.bound


def measure(model: Path, folder: Path, name: str) -> list[Measured]:
    """The synchronous run of a load, and those that overlap."""
    base = folder / f"{name.split()[0]}_0"
    run(model, base, LOADS[name], ())
    rows = [synchronous(name, base)]
    parts = rows[0].parts
    spares_rollout = parts["rollout"] >= parts["update"] + parts["sync"]
    for extra in (STALE, ONWARDS) if name == "balanced" else (STALE,):
        stale = folder / f"{name.split()[0]}_{extra[1]}"
        run(model, stale, LOADS[name], extra, spares_rollout=spares_rollout)
        rows.append(overlapping(name, stale, base, extra, rows[0], own_core=spares_rollout))
    return rows


def step_seconds(folder: Path) -> float:
    """From the end of one update to the next, on the average of the steps that are measured: all that passes."""
    _, updates = read_steps(folder / FOLDER)
    return (updates[STEPS] - updates[WARM]) / (STEPS - WARM)


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


def synchronous(name: str, folder: Path) -> Measured:
    metrics = [m for m in read_metrics(folder) if m["step"] > WARM]
    step_s = step_seconds(folder)
    rollout = mean(m["time/rollout_s"] + m.get("time/reward_s", 0.0) for m in metrics)
    sync = mean(m.get("time/sync_s", 0.0) for m in metrics)
    update = step_s - rollout - sync
    return Measured(
        load=name,
        schedule=SYNCHRONOUS,
        step_s=step_s,
        simulated_s=simulated(folder, LOADS[name], ()),
        by_itself_s=simulated_by_itself(folder, LOADS[name], ()),
        parts={"rollout": rollout, "update": update, "sync": sync},
        bound=step_s / max(rollout, update + sync),
        gain=1.0,
        taken_ms=taken_ms(folder),
        busy_machine=os.getloadavg()[0],
    )


def overlapping(
    name: str, folder: Path, base: Path, extra: Sequence[str], plain: Measured, *, own_core: bool
) -> Measured:
    """`own_core`: the rollout shares its core with nobody."""
    metrics = [m for m in read_metrics(folder) if m["step"] > WARM]
    step_s = step_seconds(folder)
    return Measured(
        load=name,
        schedule="one step off" if extra == STALE else "two steps off, recompute, finish",
        step_s=step_s,
        simulated_s=simulated(base, LOADS[name], extra, own_core=own_core),
        by_itself_s=simulated_by_itself(folder, LOADS[name], extra),
        bound=plain.bound,
        gain=plain.step_s / step_s,
        longer_half=longer_half(folder),
        taken_ms=taken_ms(folder),
        idle={pool: median(m[f"time/{pool}_idle_share"] for m in metrics) for pool in ("train", "rollout")},
        busy_machine=os.getloadavg()[0],
    )


def simulated(base: Path, load: Load, extra: Sequence[str], *, own_core: bool = False) -> float:
    """Seconds of a step by simulation, with rates of the synchronous run."""
    rates, lengths = measured_rates(base, read_metrics(base), devices_of_run(base))
    if own_core:  # what the controller needs of training's core is in the seconds of an update
        rates = replace(rates, controller_s=0.0)
    return simulate(setting_of(load, extra), rates, lengths, steps=STEPS - WARM).step_s


def simulated_by_itself(folder: Path, load: Load, extra: Sequence[str]) -> float:
    """The same with rates of this very run: whether the schedule is simulated as it happened."""
    steps, _ = read_steps(folder / FOLDER)
    later = [steps[step] for step in sorted(steps) if step > WARM]
    moments = read_times(folder / FILE, last_steps=STEPS - WARM)
    trained = mean(end - begin for begin, end, _ in spans(moments, "train", "trained"))
    latency, decode, per_sample = fit_decoding(later, devices_of_run(folder))
    per_s = mean(sum(step.lengths) for step in later) / trained
    rates = Rates(
        decode_s=decode,
        decode_s_per_sample=per_sample,
        latency_s=latency,
        train_tokens_per_s=per_s,
        prefill_tokens_per_s=PREFILL_SPEEDUP * per_s,
        sync_s=mean(end - begin for begin, end, _ in spans(moments, "publish", "served")),
    )
    lengths = [max(length, 1) for step in later for length in step.lengths]
    return simulate(setting_of(load, extra), rates, lengths, steps=STEPS - WARM).step_s


def setting_of(load: Load, extra: Sequence[str]) -> Setting:
    return Setting(
        train_devices=1,
        rollout_devices=1,
        groups_per_step=load.prompts,
        samples_per_group=load.samples,
        max_staleness=int(extra[1]) if extra else 0,
        partial="recompute" in extra,
    )
