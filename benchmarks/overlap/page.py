"""Rows as a table of the terminal, and of docs/schedule_figures.md."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.overlap.rows import Measured

ROOT = Path(__file__).resolve().parents[2]
PAGE, TABLE = ROOT / "docs" / "schedule_figures.md", ROOT / "docs" / "overlap.json"
BEGIN, END = "<!-- overlap: begin -->", "<!-- overlap: end -->"
"""Around what is written into the page."""
HEADINGS = (
    "load", "schedule", "rollout + update + sync, s", "step, s", "between runs", "simulated, s", "difference",
    "gain", "bound", "reached", "longer half", "CPU ms: train, rollout, controller", "queued ms",
)  # fmt: skip


def cells(row: Measured) -> list[str]:
    overlaps = row.reached is not None
    return [
        row.load,
        row.schedule,
        " + ".join(f"{seconds:.3f}" for seconds in row.parts.values()),
        f"{row.step_s:.3f}",
        f"{row.spread:.1%}" if row.spread else "",
        f"{row.simulated_s:.3f}",
        f"{row.off:+.1%}",
        f"{row.gain:.2f} x" if overlaps else "",
        f"{row.bound:.2f} x",
        f"{row.reached:.0%}" if overlaps else "",
        f"{row.longer_half:.0%}" if overlaps else "",
        ", ".join(f"{part['cpu']:.0f}" for part in row.taken_ms.values()),
        ", ".join(f"{part['queued']:.0f}" for part in row.taken_ms.values()),
    ]


def show(rows: Sequence[Measured]) -> None:
    table = Table()
    for column in HEADINGS:
        table.add_column(column, justify="left" if column in ("load", "schedule") else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=180).print(table)


def read(file: Path) -> list[Measured]:
    """The rows of an earlier call; none where there is no file."""
    if not file.exists():
        return []
    return [Measured(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def write(file: Path, rows: Sequence[Measured]) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    content = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def lines(file: Path) -> list[str]:
    """Markdown of the file's rows."""
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = [Measured(**row) for row in content["rows"]]
    return [
        f"{content['date']}, {content['machine']}; load at most {max(row.busy_machine for row in rows):.1f}; "
        f"largest difference {max((row.off for row in rows), key=abs):+.1%}.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"|---|---|{'---:|' * (len(HEADINGS) - 2)}",
        *(f"| {' | '.join(cells(row))} |" for row in rows),
    ]


def write_page(file: Path) -> None:
    """The table between its marks of the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text("\n".join([head + BEGIN, *lines(file), END]) + rest.partition(END)[2], encoding="utf-8")
