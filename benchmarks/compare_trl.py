"""A GRPO step in rlsdk, in TRL and in a bare loop: `python -m benchmarks.compare_trl [--threads 1] [--json PATH]`.

All three train the quickstart's model (1.1 million parameters, warm-started here) on its task: 64 prompts x 8 samples
of up to 6 tokens, one update a step. They take turns, each in a process of its own; TRL in an environment of its own,
which is made when first needed. Figures are of all processes of a run together, over the steps after the first five;
Linux only. `--before FOLDER` takes another checkout of this repository, with its `.venv-dev`, in turn with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.marks import FILE, STEPS, memory_bytes

ROOT = Path(__file__).resolve().parent.parent
TRL_ENVIRONMENT = ROOT / ".venv-trl"
TRL = "trl==1.16.0"
WARM_UP = 5
"""Steps that are not counted: allocators, caches and kernels settle."""
LOOK_S = 0.5
"""Between two looks at the memory."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is measured."""

    command: Sequence[str]
    root: Path = ROOT
    """Where it runs, and where Python finds the checkout."""


@dataclass(frozen=True)
class Figures:
    """Of one run, or the medians of several."""

    cpu_s: float
    """A step, all processes together."""
    wall_s: float
    """A step."""
    generate_s: float
    """A step, wall time of it."""
    update_s: float
    """A step, wall time of it."""
    first_step_s: float
    """From the start of the process to the end of step 1."""
    memory_mib: float
    """Largest proportional set size of all processes together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the engines: the same for all")
    parser.add_argument("--before", type=Path, help="another checkout, to compare this one with")
    parser.add_argument("--only", nargs="+", help="of bare, TRL, rlsdk, before; default: all")
    parser.add_argument("--json", type=Path, help="write settings and every run here")
    args = parser.parse_args()
    if not args.only or "TRL" in args.only:
        make_trl_environment()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, words = make_inputs(folder, args.steps)
        programs = commands(model, words, args.steps, args.threads, folder / "runs")
        if args.before is not None:
            programs["before"] = before(args.before.resolve(), programs["rlsdk"])
        programs = {name: program for name, program in programs.items() if name in (args.only or programs)}
        runs: dict[str, list[Figures]] = {name: [] for name in programs}
        for number in range(args.rounds):
            for name, program in programs.items():
                runs[name].append(measure(program, folder, args.steps, args.threads))
                print(f"round {number + 1} {name:6}", runs[name][-1], flush=True)
    medians = {program: median(found) for program, found in runs.items()}
    show(medians, args.threads)
    if args.json:
        report = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "settings": {key: str(value) for key, value in vars(args).items()},
            "runs": {program: [asdict(run) for run in found] for program, found in runs.items()},
        }
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def make_trl_environment() -> None:
    script = ROOT / "tools" / "environment.py"
    subprocess.run([sys.executable, str(script), str(TRL_ENVIRONMENT), "--packages", TRL], check=True)


def make_inputs(folder: Path, steps: int) -> tuple[Path, Path]:
    """A model after the quickstart's warm start, and words of its task, one a line."""
    from rlsdk.config import load_config
    from rlsdk.data.quickstart import load_quickstart
    from rlsdk.registry import Registry
    from rlsdk.trainer.runs.quickstart import make_model

    recipe = files("rlsdk.trainer.recipes") / "quickstart.yaml"
    config = make_model(load_config([Path(str(recipe))], [], Registry.discover()), folder)
    flags = ["--config", str(recipe), "--model", str(config.model.path), "--model.init_from_config", "true"]
    run = ["--trainer.run_dir", str(folder / "warm"), "--trainer.run_name", "sft"]
    rlsdk = str(Path(sys.executable).with_name("rlsdk"))
    subprocess.run([rlsdk, "sft", *flags, *run], check=True, stdout=subprocess.DEVNULL)
    (model,) = (found.parent for found in (folder / "warm").rglob("*.safetensors"))
    task = load_quickstart("spell_backward", size=steps * 64, seed=7)
    words = folder / "words.txt"
    words.write_text("\n".join(str(row["answer"])[::-1].lower() for row in task), encoding="utf-8")
    return model, words


def commands(model: Path, words: Path, steps: int, threads: int, runs: Path) -> dict[str, Program]:
    size = ["--steps", str(steps), "--threads", str(threads)]
    recipe = str(files("rlsdk.trainer.recipes") / "quickstart.yaml")
    settings = {
        "--model": str(model),
        "--trainer.steps": str(steps),
        "--trainer.updates_per_step": "1",
        "--trainer.save_every_steps": "null",
        "--trainer.run_dir": str(runs),
        "--trainer.callbacks": "[benchmarks.marks:mark]",
        "--sft.steps": "0",
        # As many words as the other two get; the quickstart holds 512 more back for evaluations.
        "--data.options": f"{{size: {steps * 64 + 512}, seed: 7}}",
        "--eval.every_steps": "null",
        "--algorithm.old_log_probs": "auto",
        "--train.optim.schedule": "constant",
        "--placement.cpus_per_device": str(threads),
    }
    flags = [part for setting in settings.items() for part in setting]
    trl = str(TRL_ENVIRONMENT / "bin" / "python")
    return {
        "bare": Program(command=[sys.executable, "-m", "benchmarks.bare_loop", str(model), str(words), *size]),
        "TRL": Program(command=[trl, "-m", "benchmarks.trl_loop", str(model), str(words), *size]),
        "rlsdk": Program(command=[sys.executable, "-m", "rlsdk.cli", "train", "--config", recipe, *flags]),
    }


def before(root: Path, now: Program) -> Program:
    """The same run of another checkout, with its own quickstart."""
    _, *arguments = now.command
    arguments[arguments.index("--config") + 1] = str(root / "rlsdk" / "trainer" / "recipes" / "quickstart.yaml")
    return Program(command=[str(root / ".venv-dev" / "bin" / "python"), *arguments], root=root)


def measure(program: Program, folder: Path, steps: int, threads: int) -> Figures:
    """Runs a program to its end and reads its marks."""
    marks = folder / "marks.jsonl"
    marks.unlink(missing_ok=True)
    environment = {
        **os.environ,
        FILE: str(marks),
        STEPS: f"{WARM_UP},{steps}",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(program.root),
        "HF_HUB_OFFLINE": "1",
    }
    # An environment that compiles modules when they are first imported would compile them in every process.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = folder / "log.txt"
    with log.open("w") as out:
        start = time.time()
        process = subprocess.Popen(
            program.command, env=environment, cwd=program.root, stdout=out, stderr=subprocess.STDOUT
        )
        largest = 0
        while process.poll() is None:
            try:
                largest = max(largest, memory_bytes(psutil.Process(process.pid)))
            except psutil.Error:
                break
            time.sleep(LOOK_S)
    if process.wait():
        sys.exit(f"{' '.join(program.command)} failed ({process.returncode}):\n{log.read_text()[-4000:]}")
    lines = [json.loads(line) for line in marks.read_text(encoding="utf-8").splitlines()]
    counted = lines[WARM_UP:]
    return Figures(
        cpu_s=(lines[-1]["cpu_s"] - lines[WARM_UP - 1]["cpu_s"]) / len(counted),
        wall_s=(lines[-1]["time"] - lines[WARM_UP - 1]["time"]) / len(counted),
        generate_s=part(counted, "generate_s", "time/rollout_s"),
        update_s=part(counted, "update_s", "time/update_s"),
        first_step_s=lines[0]["time"] - start,
        memory_mib=largest / 2**20,
    )


def part(lines: Sequence[dict[str, dict[str, float]]], *names: str) -> float:
    """Mean of a part that goes by one of these names; NaN where a program does not say."""
    found = [line["parts"][name] for line in lines for name in names if name in line["parts"]]
    return statistics.fmean(found) if found else float("nan")


def median(runs: Sequence[Figures]) -> Figures:
    rows = [asdict(run) for run in runs]
    return Figures(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def show(medians: dict[str, Figures], threads: int) -> None:
    table = Table(title=f"one GRPO step, 64 x 8 samples, 1.1 M parameters, {threads} thread(s); medians")
    for name in ("", "CPU s", "x bare", "x TRL", "wall s", "x bare", "x TRL", "generate s", "update s"):
        table.add_column(name, justify="right")
    table.add_column("to end of step 1, s", justify="right")
    table.add_column("peak MiB", justify="right")
    unknown = Figures(**dict.fromkeys(asdict(next(iter(medians.values()))), float("nan")))
    bare, trl = (medians.get(name, unknown) for name in ("bare", "TRL"))
    for program, one in medians.items():
        cells = [f"{one.cpu_s:.3f}", f"{one.cpu_s / bare.cpu_s:.2f}", f"{one.cpu_s / trl.cpu_s:.2f}"]
        cells += [f"{one.wall_s:.3f}", f"{one.wall_s / bare.wall_s:.2f}", f"{one.wall_s / trl.wall_s:.2f}"]
        cells += [f"{one.generate_s:.3f}", f"{one.update_s:.3f}", f"{one.first_step_s:.1f}", f"{one.memory_mib:.0f}"]
        table.add_row(program, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
