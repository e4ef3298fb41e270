"""Faults and inputs until the time is over: `python -m benchmarks.campaign --minutes 60 --seed 1`.

A run of eight steps is made once without a fault. Then faults strike runs like it, in turn, each at another moment;
every one must end with the same numbers and samples and a whole checkpoint, at once or resumed by the same command.
Before that, inputs are drawn for the properties of `tests/fuzz`. Results add up over calls in one JSON file, so that a
campaign can be made in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.campaign.faults import FAULTS, Fault, strike
from benchmarks.campaign.inputs import try_inputs
from benchmarks.campaign.runs import ROOT, Run
from rlsdk.testing.process.models import write_tiny_model

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
"""Around what is written into the page."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing new begins after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--examples", type=int, default=2000, help="inputs per property, each time")
    parser.add_argument("--only", action="append", help="faults whose name holds this, or `inputs`")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "campaign.json")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    results = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else new_results()
    results["commands"].append(f"python -m benchmarks.campaign {' '.join(sys.argv[1:])}")
    chosen = [fault for fault in FAULTS if not args.only or any(word in fault.name for word in args.only)]
    wants_inputs = not args.only or "inputs" in args.only
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="rlsdk-campaign-") as folder, progress() as bar:
        task = bar.add_task("", total=60 * args.minutes)
        if wants_inputs:
            bar.update(task, description=f"inputs, {args.examples} of each kind")
            add_inputs(results, args.seed, args.examples, max(60.0, deadline - time.monotonic()))
        strike_faults(
            results,
            chosen,
            Path(folder),
            args,
            deadline,
            lambda text, done: bar.update(task, description=text, completed=done),
        )
    save(results, args.json)
    Console().print(table(results))
    if args.docs:
        write_page(results)
    sys.exit(1 if failures(results) else 0)


def save(results: dict[str, Any], file: Path) -> None:
    """After every fault: a campaign that is ended early keeps what it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    results["date"] = datetime.now(UTC).date().isoformat()
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")


def new_results() -> dict[str, Any]:
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "commands": [],
        "faults": {},
        "inputs": {},
        "steps": 0,
        "samples": 0,
        "seconds": 0.0,
    }


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description:60.60}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    )


def add_inputs(results: dict[str, Any], seed: int, examples: int, timeout_s: float) -> None:
    tried, seconds = try_inputs(seed, examples, timeout_s)
    for one in tried:
        entry = results["inputs"].setdefault(one.what, {"inputs": 0, "failed": 0})
        entry["inputs"] += one.inputs
        entry["failed"] += not one.held
    results["seconds"] += seconds


def strike_faults(
    results: dict[str, Any], chosen: Sequence[Fault], folder: Path, args: Any, deadline: float, told: Any
) -> None:
    """Strikes the faults in turn until the time is over, each once at least."""
    if not chosen:
        return
    start, seed = time.monotonic(), args.seed
    model = str(write_tiny_model(folder / "model"))
    told("the undisturbed run", 0)
    whole = Run(folder=folder / "whole", model=model, steps=args.steps)
    try:
        whole.start()
        if code := whole.finish():
            sys.exit(f"the undisturbed run ended with {code}:\n{whole.output[-3000:]}")
    finally:
        whole.close()
    add_load(results, whole)
    for number, fault in enumerate(cycle(chosen)):
        if number >= len(chosen) and time.monotonic() > deadline:
            break
        told(f"{fault.name}, number {number // len(chosen) + 1}", time.monotonic() - start)
        outcome = strike(fault, folder / f"{number}", model, whole, seed + number)
        if outcome.too_late:
            continue
        entry = results["faults"].setdefault(fault.name, {"struck": 0, "survived": 0, "seconds": 0.0, "lost": []})
        entry["struck"] += 1
        entry["survived"] += outcome.survived
        entry["seconds"] += outcome.seconds
        entry["lost"] += [{"seed": seed + number, **asdict(outcome)}] if not outcome.survived else []
        add_load(results, whole)
        results["seconds"] += outcome.seconds
        save(results, args.json)


def add_load(results: dict[str, Any], whole: Run) -> None:
    results["steps"] += whole.steps
    results["samples"] += whole.steps * 16


def failures(results: Mapping[str, Any]) -> int:
    faults = [int(entry["struck"] - entry["survived"]) for entry in results["faults"].values()]
    return sum(faults) + sum(int(entry["failed"]) for entry in results["inputs"].values())


def rows(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, how often, held, lost)."""
    found = [
        (
            f"fault: {name}",
            f"{e['struck']}",
            f"{e['survived']}",
            "; ".join(x["lost"][0] for x in e["lost"]) or "nothing",
        )
        for name, e in results["faults"].items()
    ]
    for name, e in results["inputs"].items():
        found.append(
            (
                f"inputs: {name}",
                f"{e['inputs']:,}",
                "all" if not e["failed"] else "not all",
                "nothing" if not e["failed"] else f"{e['failed']} found",
            )
        )
    found.append(("load: steps of training that were checked", f"{results['steps']:,}", "all", "nothing"))
    found.append(("load: samples of those steps", f"{results['samples']:,}", "all", "nothing"))
    return found


def table(results: Mapping[str, Any]) -> Table:
    shown = Table(title=f"{results['seconds'] / 60:.0f} minutes, {results['machine']}")
    for heading in ("what", "tried", "held", "lost"):
        shown.add_column(heading, justify="right" if heading in ("tried", "held") else "left")
    for row in rows(results):
        shown.add_row(*row)
    return shown


def write_page(results: Mapping[str, Any]) -> None:
    """The table between its marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [
        BEGIN,
        f"{results['date']}, {results['machine']}, {results['seconds'] / 60:.0f} minutes.",
        "",
        *(f"    {command}" for command in results["commands"]),
        "",
        "| what | tried | held | lost |",
        "|---|---:|---:|---|",
        *(f"| {' | '.join(row)} |" for row in rows(results)),
        END,
    ]
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(head + "\n".join(lines) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
