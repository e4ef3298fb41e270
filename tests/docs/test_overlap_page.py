"""The table of measured and simulated steps is what the file of the benchmark makes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.overlap import page
from benchmarks.overlap.rows import SYNCHRONOUS, Measured

PLAIN = Measured(
    load="balanced", schedule=SYNCHRONOUS, step_s=0.5, simulated_s=0.505, gain=1.0, bound=2.0,
    parts={"rollout": 0.25, "update": 0.24, "sync": 0.01}, busy_machine=0.7,
)  # fmt: skip
STALE = Measured(
    load="balanced", schedule="one step off", step_s=0.25, simulated_s=0.235, spread=0.021, gain=2.0, bound=2.0,
    longer_half=0.99, taken_ms={"train": {"cpu": 240.0, "queued": 1.0}, "rollout": {"cpu": 246.0, "queued": 2.0}},
)  # fmt: skip


def test_a_row_has_what_was_measured_simulated_and_reached(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    page.write(file, [PLAIN, STALE])
    assert page.read(file) == [PLAIN, STALE]
    first, _, headings, _, plain, stale = page.lines(file)
    assert first.endswith("load at most 0.7; largest difference -6.0%.")
    assert headings.count("|") == plain.count("|") == stale.count("|")
    assert "| 0.250 + 0.240 + 0.010 | 0.500 |  | 0.505 | +1.0% |  | 2.00 x |  |" in plain
    assert "| 0.250 | 2.1% | 0.235 | -6.0% | 2.00 x | 2.00 x | 100% | 99% | 240, 246 | 1, 2 |" in stale


def test_the_page_has_the_table_of_its_file() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.count(page.BEGIN) == text.count(page.END) == 1
    if page.TABLE.exists():
        assert json.loads(page.TABLE.read_text(encoding="utf-8"))["rows"]
        assert "\n".join([page.BEGIN, *page.lines(page.TABLE), page.END]) in text
