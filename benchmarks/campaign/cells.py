"""Every process of a small run, killed at every moment: `python -m benchmarks.campaign.cells --minutes 30 --docs`.

`rlsdk chaos` on a run of two pools (an actor, two rollout replicas, graders; a checkpoint after each step) at staleness
0 and 1, both at once where there are two cores. A folder that holds faults gets more of them, those first that were
struck least, so a campaign can be made in pieces, and cut (SIGTERM, Ctrl-C) at any time: each fault that was over is
there. The table of `docs/reliability.md` is made of the JSON that this writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.campaign.runs import ROOT
from rlsdk.chaos.account import Outcome
from rlsdk.chaos.campaign import RESULTS
from rlsdk.chaos.faults import MOMENTS
from rlsdk.testing.process.models import write_tiny_model

PAGE = ROOT / "docs" / "reliability.md"
TABLE = ROOT / "docs" / "faults.json"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
"""Around what is written into the page."""
PROCESSES = ("controller", "actor", "rollout", "grader", "raylet", "gcs")
STALENESS = (0, 1)
TASK = (
    "--data", str(ROOT / "tests/e2e/sums.jsonl"),
    "--reward", f"{Path(__file__).with_name('reward.py')}:share_of_digits",
    "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "5",
    "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4", "--trainer.updates_per_step", "2",
    "--train.optim.lr", "1e-3", "--train.optim.warmup_steps", "0", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]", "--eval.every_steps", "null",
    "--placement.device", "cpu", "--placement.preset", "disaggregated", "--placement.devices_per_node", "3",
    "--placement.devices", "{rollout: 2}", "--rollout.max_running_samples", "1", "--trainer.save_every_steps", "1",
)  # fmt: skip
"""One sample is decoded at a time: which ones share a decoding step depends on when replicas come and go."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign.cells", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all; nothing new strikes after this")
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--staleness", type=int, action="append", help=f"unset: {list(STALENESS)}")
    parser.add_argument(
        "--in-turns", action="store_true", help="one staleness after the other, each its share of the time"
    )
    parser.add_argument("--kill", action="append", default=[], help="as `rlsdk chaos --kill`")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results" / "cells")
    parser.add_argument("--docs", action="store_true", help=f"write {TABLE.name}, and the table of {PAGE.name}")
    args = parser.parse_args()
    model = args.folder / "model"
    if not model.exists():
        draft = args.folder / "model.draft"
        write_tiny_model(draft).rename(model)  # one that was cut half-way is written again
    chosen = (args.staleness or STALENESS) if args.minutes else ()
    turns = [[one] for one in chosen] if args.in_turns or (os.cpu_count() or 1) < len(chosen) else [chosen]
    try:
        codes = [code for turn in turns for code in strike(turn, args.minutes / len(turns), args, model)]
    finally:
        if args.docs:
            write_docs(args.folder)
    sys.exit(max(codes, default=0))


def strike(chosen: Sequence[int], minutes: float, args: argparse.Namespace, model: Path) -> list[int]:
    """Some minutes of faults at each staleness, at once; exit codes of the commands."""
    kills = [part for kill in args.kill for part in ("--kill", kill)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for staleness in chosen:
            command = [
                sys.executable, "-m", "rlsdk.cli", "chaos", "--model", str(model.resolve()), *TASK, "--trainer.steps",
                str(args.steps), "--schedule.max_staleness", str(staleness), *kills, "--seed", str(args.seed),
                "--minutes", str(minutes), "--folder", str(args.folder / f"staleness_{staleness}_steps_{args.steps}"),
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            started.append(subprocess.Popen(command, env=environment))
        return [process.wait() for process in started]
    except BaseException:
        # Each ends its own run first. A Ctrl-C of a terminal has reached them, too: they ignore the second signal.
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        raise


def collect(folder: Path) -> dict[str, Any]:
    """What the folders of all runs hold, by staleness."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for file in sorted(folder.glob(f"staleness_*/{RESULTS}")):
        outcomes = json.loads(file.read_text(encoding="utf-8"))["outcomes"]
        runs = [{**one, "run": f"{file.parent.name}/{one['run']}"} for one in outcomes]
        found.setdefault(file.parent.name.split("_")[1], []).extend(runs)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "staleness": found}


def table(content: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: one row for each process and moment."""
    at = {int(s): [Outcome(**one) for one in outcomes] for s, outcomes in content["staleness"].items()}
    every = [one for outcomes in at.values() for one in outcomes]
    struck = [one for one in every if one.struck]
    by_staleness = ", ".join(f"{sum(one.struck for one in found)} at staleness {s}" for s, found in at.items())
    runs = sum(len({one.run for one in found}) for found in at.values())
    again = sum(one.steps_again for one in struck)
    lines = [
        f"{content['date']}, {content['machine']}: **{len(struck)} faults struck** ({by_staleness}) in {runs} runs; "
        f"{sum(one.prompts_lost for one in struck)} prompts lost, {sum(one.trained_twice for one in struck)} trained "
        f"twice, {again} updates made again, largest difference of a metric "
        f"{max((one.difference for one in struck), default=0.0):.2g}; {sum(bool(one.wrong) for one in struck)} with "
        f"anything else wrong; {len(every) - len(struck)} found no moment to strike.",
        "",
        f"| process | moment | {' | '.join(f'struck at {s}' for s in at)} | lost | twice | updates again | "
        "seconds to detect | to recover | commands | difference |",
        f"|---|---|{'---:|' * (len(at) + 7)}",
    ]
    for process in PROCESSES:
        for moment in MOMENTS:
            name = f"{process}@{moment}"
            counts = [sum(one.struck and one.fault == name for one in found) for found in at.values()]
            lines.append(_row(process, moment, counts, [one for one in struck if one.fault == name]))
    return lines


def _row(process: str, moment: str, counts: Sequence[int], struck: Sequence[Outcome]) -> str:
    cells = [process, moment, *map(str, counts)]
    if not struck:
        return f"| {' | '.join([*cells, *[''] * 7])} |"
    cells += [str(sum(one.prompts_lost for one in struck)), str(sum(one.trained_twice for one in struck))]
    cells += [str(sum(one.steps_again for one in struck))]
    cells += [_seconds([one.detect_s for one in struck]), _seconds([one.recover_s for one in struck])]
    cells += [_range([one.commands for one in struck]), f"{max(one.difference for one in struck):.2g}"]
    return f"| {' | '.join(cells)} |"


def _seconds(values: Sequence[float | None]) -> str:
    """Median, and the longest."""
    found = [value for value in values if value is not None]
    if not found:
        return "-"
    middle, most = f"{statistics.median(found):.1f}", f"{max(found):.1f}"
    return middle if middle == most else f"{middle} (to {most})"


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def write_docs(folder: Path) -> None:
    """Writes what the folders of all runs hold into the documentation, which stays as it is where they hold nothing."""
    content = collect(folder)
    if not any(content["staleness"].values()):
        print(f"{folder} holds no fault yet: {TABLE.name} and {PAGE.name} stay as they are", file=sys.stderr)
        return
    TABLE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_page(content)


def write_page(content: Mapping[str, Any]) -> None:
    """The table between its marks of the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text("\n".join([head + BEGIN, *table(content), END]) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
