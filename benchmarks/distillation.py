"""What a teacher does to learning: `python -m benchmarks.distillation --folder RUNS [--steps 60] [--seeds 3]`.

The quickstart's model is trained first: it is the teacher. A student of a quarter of its parameters learns the task
from rewards alone, from the teacher by sampled tokens, by the exact divergence, and by that over its 8 top tokens and
the rest, in a train engine and in a rollout engine, with the same prompts, the same number of samples and the same
supervised steps before, for several seeds: a table, and the curves in one picture (`--picture`). Runs that are in the
folder already are not made again, so it can be stopped and started anew.
"""

from __future__ import annotations

import argparse
import json
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

import rlsdk.trainer
from rlsdk.system.atomic import atomic_write_text
from rlsdk.trainer.checkpoints.model_source import find_model
from rlsdk.trainer.tracking.trackers import read_metrics
from rlsdk.views.charts import Line, line_chart, sheet

QUICKSTART = Path(rlsdk.trainer.__file__).parent / "recipes" / "quickstart.yaml"
TEACHER_STEPS = 120
WIDTH = {"hidden_size": 128, "intermediate_size": 256}
"""Of the student: a quarter of the teacher's parameters."""
WINDOW = 5
"""Steps over which curves are averaged."""
LAST = 10
"""Steps at the end whose mean stands in the table."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    weight: float
    """Of the teacher; 0: its gap is only measured."""
    flags: tuple[str, ...] = ()
    gap: str = "teacher/gap"
    """Metric of the divergence from the teacher."""
    is_served: bool = False
    """Whether the teacher is in a rollout engine."""


ALONE = ("--algorithm.distillation.reward_coef", "0.0")
TOP_K = (*ALONE, "--algorithm.distillation.objective", "top_k", "--algorithm.distillation.top_k", "8")


VARIANTS = (
    Variant(name="rewards (GRPO)", weight=0.0),
    Variant(name="sampled", weight=1.0, flags=ALONE),
    Variant(
        name="exact",
        weight=1.0,
        flags=(*ALONE, "--algorithm.distillation.objective", "exact"),
        gap="policy/divergence_loss",
    ),
    Variant(name="top_k", weight=1.0, flags=TOP_K),
    Variant(name="top_k served", weight=1.0, flags=TOP_K, is_served=True),
    Variant(name="sampled and rewards", weight=1.0),
)


def command(name: str, folder: Path, *flags: str) -> None:
    """Runs `rlsdk train` into `folder/name`.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    words = [
        sys.executable, "-m", "rlsdk.cli", "train", *flags, "--placement.cpus_per_device", "1",
        "--schedule.journal", "none", "--eval.at_start", "false", "--tracking.trackers", "[jsonl]",
        "--trainer.resume", "never", "--trainer.run_dir", str(folder), "--trainer.run_name", name,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")


def teacher(folder: Path) -> Path:
    """The quickstart's trained model, which is made where it is not there yet."""
    if len(_steps(folder / "teacher")) < TEACHER_STEPS:
        command("teacher", folder, "--trainer.steps", str(TEACHER_STEPS), "--eval.every_steps", str(TEACHER_STEPS))
    return Path(find_model(folder / "teacher").model)


def student(folder: Path, of: Path) -> Path:
    """A smaller model without weights, with the teacher's tokenizer."""
    made = folder / "student"
    made.mkdir(exist_ok=True)
    for file in of.glob("*token*"):
        (made / file.name).write_bytes(file.read_bytes())
    fields = {**json.loads((of / "config.json").read_text()), **WIDTH}
    fields.pop("head_dim", None)
    atomic_write_text(made / "config.json", json.dumps(fields))
    return made


def run(variant: Variant, seed: int, steps: int, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of one run, which is made where it is not there yet."""
    name = f"{variant.name.partition(' (')[0].replace(' ', '_')}_{seed}"
    if len(found := _steps(folder / name)) >= steps:
        return found
    of = teacher(folder)
    served: Mapping[str, object] = {"rollout": {}} if variant.is_served else {}
    command(
        name, folder, "--config", str(QUICKSTART), "--model", str(student(folder, of)), "--model.init_from_config",
        "true", "--trainer.seed", str(seed), "--trainer.steps", str(steps), "--eval.every_steps", str(steps),
        "--teachers", json.dumps([{"path": str(of), "weight": variant.weight, **served}]),
        "--trainer.save_every_steps", "null", *variant.flags,
    )  # fmt: skip
    return _steps(folder / name)


def _steps(folder: Path) -> list[Mapping[str, float]]:
    return [m for m in read_metrics(folder) if "reward/accuracy" in m]


def curve(name: str, runs: Sequence[Sequence[Mapping[str, float]]], metric: str, scale: float = 1.0) -> Line:
    """A metric by step: mean over seeds and over `WINDOW` steps."""
    values = [scale * mean(m[metric] for m in each) for each in zip(*runs, strict=False)]
    smooth = [mean(values[max(at - WINDOW + 1, 0) : at + 1]) for at in range(len(values))]
    return Line(name=name, points=[(at + 1.0, value) for at, value in enumerate(smooth)])


def picture(found: Mapping[Variant, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    """Accuracy of the samples, and the divergence from the teacher."""
    accuracy = [curve(variant.name, runs, "reward/accuracy", 100.0) for variant, runs in found.items()]
    apart = [curve(variant.name, runs, variant.gap) for variant, runs in found.items()]
    return sheet(
        [
            line_chart("Accuracy of samples", accuracy, unit="%"),
            line_chart("KL(student || teacher) of a token, nats", apart),
        ]
    )


def show(found: Mapping[Variant, Sequence[Sequence[Mapping[str, float]]]], seeds: int, of: Path) -> None:
    table = Table(title=f"{seeds} seeds; the teacher: {_of_teacher(of):.1%} held-out, greedy")
    for name in ("learns from", f"accuracy, last {LAST} steps", "held-out, greedy", "KL, last steps", "s a step"):
        table.add_column(name, justify="left" if name == "learns from" else "right")
    for variant, runs in found.items():
        table.add_row(
            variant.name,
            _spread([mean(m["reward/accuracy"] for m in run[-LAST:]) for run in runs]),
            _spread([m["eval/accuracy_greedy"] for run in runs for m in run[-1:] if "eval/accuracy_greedy" in m]),
            f"{mean(m[variant.gap] for run in runs for m in run[-LAST:]):.3f}",
            f"{mean(m['time/step_s'] for run in runs for m in run[1:]):.2f}",
        )
    Console(width=120).print(table)


def _of_teacher(folder: Path) -> float:
    found = (m["eval/accuracy_greedy"] for m in reversed(read_metrics(folder)) if "eval/accuracy_greedy" in m)
    return float(next(found))


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
    args.folder.mkdir(parents=True, exist_ok=True)
    found: dict[Variant, list[Sequence[Mapping[str, float]]]] = {}
    for seed in range(args.seeds):
        for variant in VARIANTS:
            found.setdefault(variant, []).append(run(variant, seed, args.steps, args.folder.resolve()))
            if args.picture is not None:
                atomic_write_text(args.picture, picture(found))
    show(found, args.seeds, args.folder / "teacher")


if __name__ == "__main__":
    main()
