"""What staleness does to learning: `python -m benchmarks.staleness --folder RUNS [--steps 60] [--seeds 3]`.

The quickstart on pools of its own at staleness 0, 1 and 4, with the decoupled objective and without any correction, for
several seeds: a table, and the curves in one picture (`--picture`). Runs that are in the folder already are not made
again, so it can be stopped and started anew.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from rlsdk.system.atomic import atomic_write_text
from rlsdk.trainer.tracking.trackers import read_metrics
from rlsdk.views.charts import Line, line_chart, sheet

CORRECTED = ("--algorithm.old_log_probs", "auto")
NAIVE = ("--algorithm.old_log_probs", "always", "--schedule.uncorrected", "true")
WINDOW = 5
"""Steps over which curves are averaged."""
LAST = 10
"""Steps at the end whose mean stands in the table."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    staleness: int
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        if not self.staleness:
            return "synchronous"
        return f"{self.staleness} behind, {'corrected' if self.flags == CORRECTED else 'uncorrected'}"


VARIANTS = (
    Variant(staleness=0, flags=CORRECTED),
    *(Variant(staleness=steps, flags=flags) for steps in (1, 4) for flags in (CORRECTED, NAIVE)),
)


def run(variant: Variant, seed: int, steps: int, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of one run, which is made where it is not there yet.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    name = f"{variant.name.replace(', ', '_').replace(' ', '_')}_{seed}"
    if len(found := _steps(folder / name)) >= steps:
        return found
    command = [
        sys.executable, "-m", "rlsdk.cli", "train", "--trainer.seed", str(seed), "--trainer.steps", str(steps),
        "--placement.preset", "disaggregated", "--placement.devices_per_node", "2", "--placement.cpus_per_device", "1",
        "--schedule.max_staleness", str(variant.staleness), "--schedule.journal", "none", *variant.flags,
        "--eval.every_steps", str(steps), "--eval.at_start", "false", "--tracking.trackers", "[jsonl]",
        "--trainer.save_every_steps", "null", "--trainer.resume", "never",
        "--trainer.run_dir", str(folder), "--trainer.run_name", name,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")
    return _steps(folder / name)


def _steps(folder: Path) -> list[Mapping[str, float]]:
    return [m for m in read_metrics(folder) if "reward/accuracy" in m]


def curve(name: str, runs: Sequence[Sequence[Mapping[str, float]]]) -> Line:
    """Accuracy of training samples in percent: mean over seeds and over `WINDOW` steps."""
    values = [100 * mean(m["reward/accuracy"] for m in each) for each in zip(*runs, strict=False)]
    smooth = [mean(values[max(at - WINDOW + 1, 0) : at + 1]) for at in range(len(values))]
    return Line(name=name, points=[(at + 1.0, value) for at, value in enumerate(smooth)])


def picture(found: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    """One panel for each staleness, beside the synchronous run."""
    charts = []
    for staleness in (1, 4):
        shown = [variant for variant in VARIANTS if variant.staleness in (0, staleness) and variant.name in found]
        lines = [curve(v.name if not v.staleness else v.name.split(", ")[1], found[v.name]) for v in shown]
        charts.append(line_chart(f"Accuracy of samples, {staleness} behind", lines, unit="%"))
    return sheet(charts)


def show(found: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], seeds: int) -> None:
    table = Table(title=f"{seeds} seeds")
    for name in (
        "schedule",
        f"accuracy, last {LAST} steps",
        "held-out, greedy",
        "KL to the sampler at most",
        "staleness",
    ):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for name, runs in found.items():
        table.add_row(
            name,
            _spread([mean(m["reward/accuracy"] for m in run[-LAST:]) for run in runs]),
            _spread([m["eval/accuracy_greedy"] for run in runs for m in run[-1:] if "eval/accuracy_greedy" in m]),
            f"{max(m.get('policy/approx_kl', 0.0) for run in runs for m in run):.3f}",
            f"{mean(m['schedule/staleness_mean'] for run in runs for m in run):.2f}",
        )
    Console(width=120).print(table)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{mean(values):.1%}" + (f" ±{stdev(values):.1%}" if len(values) > 1 else "")


def main() -> None:
    # A run that is under way ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="SVG file")
    args = parser.parse_args()
    found: dict[str, list[Sequence[Mapping[str, float]]]] = {}
    for seed in range(args.seeds):
        for variant in VARIANTS:
            found.setdefault(variant.name, []).append(run(variant, seed, args.steps, args.folder))
            if args.picture is not None:
                atomic_write_text(args.picture, picture(found))
    show(found, args.seeds)


if __name__ == "__main__":
    main()
