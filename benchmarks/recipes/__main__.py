"""Shows every recipe learning a task fit for it, on a CPU.

    python -m benchmarks.recipes                                # every row, three seeds; cells that are done are kept
    python -m benchmarks.recipes --recipe ppo --recipe dapo --seeds 0
    python -m benchmarks.recipes --table                        # the table of what is done so far, in Markdown

A cell is a run of `rlsdk train` (of `reward-model`, `dpo` and `eval` as well in some rows) on one thread, about half a
minute. Ends with 1 if a row has a cell that did not learn.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.recipes.commands import CommandFailedError
from benchmarks.recipes.rows import Outcome, Row, rows
from benchmarks.recipes.task import Task, make_task, warm_up

RESULTS = Path("benchmarks/results")
ERROR = "eval/accuracy_se_sampled"
"""Standard error of the first figure of every row."""
LEAST_ERRORS = 3.0
"""Of a cell that learned: its gain in standard errors, as of two evaluations on words of their own. Both are on the
same words, so the true error is smaller."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row by one seed, as kept."""

    row: str
    seed: int
    seconds: float
    """By the clock."""
    cpu_seconds: float
    """Of all processes of the cell that had ended with it."""
    before: dict[str, float]
    after: dict[str, float]
    notes: dict[str, float] = field(default_factory=dict)


def main() -> None:
    args = arguments()
    table = rows()
    if unknown := set(args.recipe) - set(table):
        sys.exit(f"--recipe {sorted(unknown)}: expected some of {list(table)}")
    wanted = [table[name] for name in args.recipe] or list(table.values())
    cells = read_cells(args.json)
    if not args.table:
        end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        missing = [
            (row, seed)
            for seed in args.seeds
            for row in wanted
            if args.again or not any((cell.row, cell.seed) == (row.name, seed) for cell in cells)
        ]
        run_cells(missing, cells, args.json, make_task(args.folder, in_process=args.in_process), end)
    chosen = [cell for cell in cells if cell.row in {row.name for row in wanted}]
    print(markdown([table[name] for name in table if any(cell.row == name for cell in chosen)], chosen))
    if lost := [f"{cell.row} by seed {cell.seed}" for cell in chosen if not learned(table[cell.row], cell)]:
        sys.exit(f"did not learn (less than {LEAST_ERRORS:g} standard errors gained): {', '.join(lost)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", default=[], help="a row of the table; again for more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, default=RESULTS / "recipes.json", help="cells are kept here")
    parser.add_argument("--folder", type=Path, default=RESULTS / "recipes", help="data, models, runs")
    parser.add_argument("--minutes", type=float, help="start no cell after this long; the next call goes on")
    parser.add_argument(
        "--in-process", action="store_true", help="no cluster: the same numbers, and half the processor time"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--again", action="store_true", help="run cells that are done as well")
    return parser.parse_args()


def run_cells(missing: Sequence[tuple[Row, int]], cells: list[Cell], kept: Path, task: Task, end: float | None) -> None:
    """Runs these, one after the other, and keeps each as soon as it is done; starts none after `end`."""
    for row, seed in missing:
        if end is not None and time.monotonic() > end:
            print("out of time; call again for the rest")
            return
        try:
            run_cell(task, row, seed, cells)
        except CommandFailedError as error:
            print(
                f"{row.name} by seed {seed} failed; the next call tries it again: {error}", file=sys.stderr, flush=True
            )
            continue
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([asdict(one) for one in cells], indent=1), encoding="utf-8")


def run_cell(task: Task, row: Row, seed: int, cells: list[Cell]) -> None:
    """Runs it and puts it among the cells, in place of an older one."""
    warm_up(task, seed)
    where = task.folder / f"{row.name.replace(', ', '-')}-{seed}"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    start, cpu = time.monotonic(), cpu_of_children()
    outcome = row.run(task, seed, where)
    cell = cell_of(row, seed, time.monotonic() - start, cpu_of_children() - cpu, outcome)
    cells[:] = [*(other for other in cells if (other.row, other.seed) != (row.name, seed)), cell]
    took = f"{cell.seconds:.0f} s ({cell.cpu_seconds:.0f} of CPU)"
    print(f"{row.name:30} seed {seed}  {figures(row, cell)}  {took}  {cell.notes}", flush=True)


def cpu_of_children() -> float:
    """Seconds of processor time of this process's descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cell_of(row: Row, seed: int, seconds: float, cpu_seconds: float, outcome: Outcome) -> Cell:
    return Cell(
        row=row.name,
        seed=seed,
        seconds=round(seconds, 1),
        cpu_seconds=round(cpu_seconds, 1),
        before={name: outcome.before[name] for name in (*row.measured, ERROR)},
        after={name: outcome.after[name] for name in (*row.measured, ERROR)},
        notes={name: round(value, 4) for name, value in outcome.notes.items()},
    )


def read_cells(path: Path) -> list[Cell]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    names = {one.name for one in fields(Cell)}
    kept = [Cell(**cell) for cell in found if cell.keys() == names and {ERROR} <= cell["before"].keys()]
    if lost := len(found) - len(kept):
        print(f"{path}: {lost} cells of an earlier version of this program are left out", file=sys.stderr)
    return kept


def learned(row: Row, cell: Cell) -> bool:
    """Whether the first figure that the row measures rose by more than chance."""
    name = row.measured[0]
    before, after = cell.before[name], cell.after[name]
    return after - before > LEAST_ERRORS * math.hypot(cell.before[ERROR], cell.after[ERROR])


def figures(row: Row, cell: Cell) -> str:
    """Before and after, in percent, of each figure."""
    return "; ".join(f"{100 * cell.before[name]:.1f} to {100 * cell.after[name]:.1f}" for name in row.measured)


def markdown(table: Sequence[Row], cells: Sequence[Cell]) -> str:
    """A row of the table for each row, a column for each seed."""
    seeds = sorted({cell.seed for cell in cells})
    lines = [
        f"| recipe | {' | '.join(f'seed {seed}' for seed in seeds)} | s of CPU |",
        f"|---|{'---|' * len(seeds)}---|",
    ]
    for row in table:
        by_seed = {cell.seed: cell for cell in cells if cell.row == row.name}
        found = [figures(row, by_seed[seed]) if seed in by_seed else "" for seed in seeds]
        seconds = [cell.cpu_seconds for cell in by_seed.values()]
        lines.append(f"| `{row.name}` | {' | '.join(found)} | {min(seconds):.0f} to {max(seconds):.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
