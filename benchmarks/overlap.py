"""What overlap gains, measured, and what the simulator says of it: `python -m benchmarks.overlap [--only NAME]`.

Two pools of one core each, every pool's process held to a core of its own. Each workload runs synchronously, and then
one step off (and the balanced one two steps off, with samples that go on under new weights); 30 steps are measured.

The bound of what overlap can gain is (rollout + update + sync) / max(rollout, update + sync), of the synchronous run.
Where other programs take the cores, pools that work at the same time get less of them than one that works alone; the
last column does not depend on that: of the overlapping run's steps, the share that the longer half of each took.

The simulator gets its rates from the synchronous run's journal and metrics, as `rlsdk plan --schedule RUN` does, and
once more from the run itself, which shows whether the schedule is simulated as it happens.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import psutil
from rich.console import Console
from rich.table import Table

from rlsdk.cli.plan_schedule import devices_of_run
from rlsdk.planning.measured import PREFILL_SPEEDUP, fit_decoding, measured_rates, read_steps
from rlsdk.planning.simulation import Rates, Setting, simulate
from rlsdk.rollouts.journal import FOLDER
from rlsdk.testing.models import write_tiny_model
from rlsdk.trainer.pool_times import FILE, read_times
from rlsdk.trainer.trackers import read_metrics
from rlsdk.views.pool_chart import levels, spans

REWARD = Path(__file__).with_name("digits.py")
STEPS, WARM = 34, 4
"""Of a run, and of these at its beginning that are not measured."""
STALE = ("--schedule.max_staleness", "1")
ONWARDS = ("--schedule.max_staleness", "2", "--schedule.order", "finish", "--schedule.on_new_weights", "recompute",
           "--rollout.concurrency", "fixed")  # fmt: skip


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


LOADS = {
    "balanced": Load(prompts=2, samples=4, tokens=128),
    "rollout is longer": Load(prompts=2, samples=2, tokens=160),
    "update is longer": Load(prompts=4, samples=4, tokens=96),
}


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
    busy_machine: float = 0.0
    """Load of the machine when the run ended."""


def command(model: Path, folder: Path, load: Load, extra: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "rlsdk.cli", "train", "--model", str(model), "--data", "reasoning_gym:chain_sum",
        "--data.options", "{size: 2000, seed: 1, max_terms: 2, max_digits: 1}",
        "--reward", f"{REWARD}:share_of_digits",
        "--data.max_prompt_tokens", "96", "--placement.preset", "disaggregated", "--placement.devices_per_node", "2",
        "--placement.device", "cpu", "--eval.every_steps", "null", "--eval.at_start", "false",
        "--tracking.trackers", "[jsonl]", "--trainer.save_every_steps", "null", "--schedule.journal", "all",
        "--trainer.steps", str(STEPS), "--trainer.resume", "never",
        # The sampler's log-probs in the ratio: stale steps do the same work as synchronous ones.
        "--algorithm.old_log_probs", "rollout", "--algorithm.skip_zero_advantage", "false",
        "--trainer.run_dir", str(folder.parent), "--trainer.run_name", folder.name, *load.flags, *extra,
    ]  # fmt: skip


def run(model: Path, folder: Path, load: Load, extra: Sequence[str]) -> None:
    """One run, its two workers held to two cores. One that is there already is not made again.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    if STEPS in read_steps(folder / FOLDER)[1]:
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command(model, folder, load, extra), stdout=said, stderr=said, env=environment)
        pinning = threading.Thread(target=pin, args=(process,), daemon=True)
        pinning.start()
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if code:
            said.seek(0)
            raise RuntimeError(f"the run failed ({code}):\n{said.read()[-4000:]}")


def pin(process: subprocess.Popen[bytes]) -> None:
    """Holds every thread of each pool's worker to one core of this process, as long as the run goes on."""
    cores = sorted(os.sched_getaffinity(0))
    while process.poll() is None:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            workers = sorted(child.pid for child in children if "ray::DeviceWorker" in " ".join(child.cmdline()))
            for at, pid in enumerate(workers):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {cores[at % len(cores)]})
        except (psutil.Error, OSError):
            pass  # one has ended meanwhile
        time.sleep(0.5)


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
        schedule="synchronous",
        step_s=step_s,
        simulated_s=simulated(folder, LOADS[name], ()),
        by_itself_s=simulated_by_itself(folder, LOADS[name], ()),
        parts={"rollout": rollout, "update": update, "sync": sync},
        bound=step_s / max(rollout, update + sync),
        gain=1.0,
        busy_machine=os.getloadavg()[0],
    )


def overlapping(name: str, folder: Path, base: Path, extra: Sequence[str], plain: Measured) -> Measured:
    metrics = [m for m in read_metrics(folder) if m["step"] > WARM]
    step_s = step_seconds(folder)
    return Measured(
        load=name,
        schedule="one step off" if extra == STALE else "two steps off, recompute, finish",
        step_s=step_s,
        simulated_s=simulated(base, LOADS[name], extra),
        by_itself_s=simulated_by_itself(folder, LOADS[name], extra),
        bound=plain.bound,
        gain=plain.step_s / step_s,
        longer_half=longer_half(folder),
        idle={pool: median(m[f"time/{pool}_idle_share"] for m in metrics) for pool in ("train", "rollout")},
        busy_machine=os.getloadavg()[0],
    )


def simulated(base: Path, load: Load, extra: Sequence[str]) -> float:
    """Seconds of a step by simulation, with rates of the synchronous run."""
    rates, lengths = measured_rates(base, read_metrics(base), devices_of_run(base))
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


def measure(model: Path, folder: Path, name: str) -> list[Measured]:
    base = folder / f"{name.split()[0]}_0"
    run(model, base, LOADS[name], ())
    rows = [synchronous(name, base)]
    for extra in (STALE, ONWARDS) if name == "balanced" else (STALE,):
        stale = folder / f"{name.split()[0]}_{extra[1]}"
        run(model, stale, LOADS[name], extra)
        rows.append(overlapping(name, stale, base, extra, rows[0]))
    return rows


def show(rows: Sequence[Mapping[str, object]]) -> None:
    table = Table()
    for column in (
        "load",
        "schedule",
        "rollout + update + sync, s",
        "step, s",
        "simulated",
        "by own rates",
        "gain",
        "bound",
        "reached",
        "longer half",
    ):
        table.add_column(column, justify="left" if column in ("load", "schedule") else "right")
    for found in rows:
        row = Measured(**found)  # type: ignore[arg-type]
        table.add_row(
            row.load,
            row.schedule,
            " + ".join(f"{seconds:.3f}" for seconds in row.parts.values()),
            f"{row.step_s:.3f}",
            f"{row.simulated_s / row.step_s - 1:+.0%}",
            f"{row.by_itself_s / row.step_s - 1:+.0%}",
            f"{row.gain:.2f} x",
            f"{row.bound:.2f} x",
            "" if row.schedule == "synchronous" else f"{row.gain / row.bound:.0%}",
            "" if row.schedule == "synchronous" else f"{row.longer_half:.0%}",
        )
    Console(width=140).print(table)


def main() -> None:
    # A run that is under way ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LOADS)
    parser.add_argument("--folder", type=Path, help="folder of the runs; finished ones are kept")
    parser.add_argument("--json", type=Path, help="adds the rows to those of this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        model = folder / "model"
        if not model.exists():
            write_tiny_model(model, layers=4, hidden_size=256, intermediate_size=512)
        names = [args.only] if args.only else list(LOADS)
        rows = [asdict(row) for name in names for row in measure(model, folder, name)]
    if args.json is not None:
        before = json.loads(args.json.read_text()) if args.json.exists() else []
        rows = [row for row in before if row["load"] not in names] + rows
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
