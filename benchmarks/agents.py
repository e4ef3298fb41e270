"""What agents learn: `python -m benchmarks.agents --folder RUNS [--tasks guess notes] [--seeds 3]`.

Each task is an example with a model of random weights, and takes minutes on two cores:

- guess: bisection with a tool (examples/guess/guess.py);
- notes: bisection with notes, where every turn is a row of its own (examples/guess/notes.py);
- notes-last-row: the same with the last row of each episode trained alone: what the other rows are worth;
- client: the calculator through a stock `openai` client (examples/calculator/agent.py);
- tictactoe: two players of one policy, each a chain with a score of its own (examples/tictactoe/tictactoe.py); held-out
  games are against a random player, and accuracy is the share that was won;
- tictactoe-one-score: the same with the first player's score for both.

A table of held-out accuracy before and after. Runs that are in the folder already are not made again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from rlsdk.trainer.tracking.trackers import read_metrics

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GUESS, CALCULATOR, TICTACTOE = (EXAMPLES / name for name in ("guess", "calculator", "tictactoe"))
SAMPLED, GREEDY = "eval/accuracy_sampled", "eval/accuracy_greedy"
NOTES = ("--rollout.rollouter", f"{GUESS / 'notes.py'}:play", "--rewards", f"[{{name: '{GUESS / 'notes.py'}:right'}}]")
PLAYERS = (
    "--rollout.rollouter", f"{TICTACTOE / 'tictactoe.py'}:play",
    "--rewards", f"[{{name: '{TICTACTOE / 'tictactoe.py'}:score'}}]",
)  # fmt: skip
RLSDK = (sys.executable, "-m", "rlsdk.cli")


@dataclass(frozen=True, kw_only=True)
class Task:
    """An example and the run that learns it."""

    prepare: Sequence[str]
    """Script and arguments that write its data and model, once; a folder comes behind the script."""
    config: Path
    flags: Sequence[str] = ()
    warm_start: str = ""
    """Data of supervised training that comes first, as a run of its own; empty: none does."""
    warm_steps: int = 150
    data: str = "train.jsonl"
    eval: str = ""
    """Data of the evaluation; empty: rows are held out of `data`."""


TASKS: Mapping[str, Task] = {
    "guess": Task(prepare=(f"{GUESS / 'games.py'}",), config=GUESS / "run.yaml",
                  flags=("--rollout.environment", f"{GUESS / 'guess.py'}:Guess")),
    "notes": Task(prepare=(f"{GUESS / 'notes_games.py'}",), config=GUESS / "notes.yaml", warm_start="turns.jsonl",
                  data="games.jsonl", flags=NOTES),
    "notes-last-row": Task(prepare=(f"{GUESS / 'notes_games.py'}",), config=GUESS / "notes.yaml",
                           warm_start="turns.jsonl", data="games.jsonl",
                           flags=(*NOTES, "--rollout.rollouter_options", "{last_row_only: true}")),
    "client": Task(prepare=(f"{CALCULATOR / 'prepare.py'}", "--chat"), config=CALCULATOR / "run.yaml",
                   flags=("--rollout.agent", f"{CALCULATOR / 'agent.py'}:calculate", "--rollout.rollouter",
                          "single_turn", "--rollout.rollouter_options", "{}", "--rewards",
                          f"[{{name: '{CALCULATOR / 'calculator.py'}:right'}}]")),
    "tictactoe": Task(prepare=(f"{TICTACTOE / 'positions.py'}",), config=TICTACTOE / "run.yaml",
                      warm_start="positions.jsonl", warm_steps=400, data="games.jsonl", eval="held_out.jsonl",
                      flags=PLAYERS),
    "tictactoe-one-score": Task(prepare=(f"{TICTACTOE / 'positions.py'}",), config=TICTACTOE / "run.yaml",
                                warm_start="positions.jsonl", warm_steps=400, data="games.jsonl",
                                eval="held_out.jsonl",
                                flags=(*PLAYERS, "--rollout.rollouter_options", "{one_score: true}")),
}  # fmt: skip


def main() -> None:
    # A run that is under way ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of data and runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run, instead of the example's")
    args = parser.parse_args()
    table = Table(title="held-out accuracy: before, after")
    for name in ("task", "seed", "sampled", "greedy", "rows an episode", "seconds"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name in args.tasks:
        for seed in range(args.seeds):
            lines = run(name, seed, args.steps, args.folder.resolve())
            table.add_row(name, f"{seed}", *(_ends(lines, metric) for metric in (SAMPLED, GREEDY)), *_costs(lines))
    Console(width=110).print(table)


def run(name: str, seed: int, steps: int | None, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of one run, which is made where it is not there yet.

    Raises:
        RuntimeError: a command failed, with what it said.
    """
    task, made = TASKS[name], folder / f"{name}-{seed}"
    data = folder / f"data-{Path(task.prepare[0]).stem}"
    if not (made / "end.json").exists():
        if not data.exists():
            _call(sys.executable, task.prepare[0], str(data), *task.prepare[1:])
        model = _warm(data, task, seed, folder) if task.warm_start else data / "model"
        held_out = ("--data.eval", str(data / task.eval)) if task.eval else ()
        _call(
            *RLSDK, "train", "--config", str(task.config), "--model", str(model), "--data", str(data / task.data),
            *held_out, *task.flags, *(() if steps is None else ("--trainer.steps", str(steps))), "--trainer.seed",
            str(seed), "--trainer.run_dir", str(folder), "--trainer.run_name", made.name, "--trainer.resume", "never",
        )  # fmt: skip
    return list(read_metrics(made))


def _warm(data: Path, task: Task, seed: int, folder: Path) -> Path:
    """The model after supervised training on turns of random games; tasks of one script begin with the same."""
    made = folder / f"{data.name}-warm-{seed}"
    if not (made / "end.json").exists():
        _call(
            *RLSDK, "sft", "--model", str(data / "model"), "--model.init_from_config", "true", "--data",
            str(data / task.warm_start), "--data.max_prompt_tokens", "16", "--rollout.max_response_tokens", "8",
            "--rollout.stop_token_ids", '["<eos>", ";"]', "--sft.steps", f"{task.warm_steps}", "--sft.rows_per_step",
            "64", "--sft.lr", "1e-3", "--sft.warmup_steps", "10", "--eval.every_steps", "null", "--tracking.trackers",
            "[jsonl]", "--trainer.seed", str(seed), "--trainer.run_dir", str(folder), "--trainer.run_name", made.name,
        )  # fmt: skip
    return made / "model"


def _call(*command: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")
    print(f"{command[3] if command[1] == '-m' else command[1]}: {time.monotonic() - started:.0f} s", flush=True)


def _ends(lines: Sequence[Mapping[str, float]], name: str) -> str:
    values = [line[name] for line in lines if name in line]
    return f"{values[0]:.1%}, {values[-1]:.1%}" if values else ""


def _costs(lines: Sequence[Mapping[str, float]]) -> tuple[str, str]:
    steps = [line for line in lines if "time/step_s" in line]
    rows = [line["rollout/turns"] for line in steps if "rollout/turns" in line]
    return f"{mean(rows):.2f}" if rows else "", f"{sum(line['time/step_s'] for line in steps):.0f}"


if __name__ == "__main__":
    main()
