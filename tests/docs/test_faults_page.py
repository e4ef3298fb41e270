"""The table of faults in docs/reliability.md is that of the campaign's results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.campaign import cells  # noqa: E402
from benchmarks.campaign.cells import BEGIN, END, TABLE, table  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"


def test_the_page_shows_what_the_campaign_found() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown = rest.partition(END)[0].strip().splitlines()
    assert shown == table(json.loads(TABLE.read_text(encoding="utf-8")))


def test_a_row_adds_up_the_faults_of_its_process_and_moment() -> None:
    fault = {"fault": "actor@update", "run": "faults_1", "step": 3, "struck": True, "difference": 0.0}
    again = {**fault, "prompts_lost": 2, "steps_again": 1, "detect_s": 0.5, "recover_s": 11.04, "commands": 2}
    later = {**fault, "detect_s": 1.5, "difference": 0.25, "wrong": ["left behind"]}
    missed = {**fault, "struck": False}
    lines = table({"date": "2026-11-23", "machine": "2 cores", "staleness": {"0": [again, missed], "1": [later]}})
    assert "**2 faults struck** (1 at staleness 0, 1 at staleness 1) in 2 runs; 2 prompts lost" in lines[0]
    assert "1 with anything else wrong; 1 found no moment" in lines[0]
    (row,) = [line for line in lines if line.startswith("| actor | update |")]
    assert row == "| actor | update | 1 | 1 | 2 | 0 | 1 | 1.0 (to 1.5) | 11.0 | 1 to 2 | 0.25 |"
    assert len(lines) == 4 + 36


def test_a_campaign_that_was_cut_before_its_first_fault_leaves_the_page_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, faults, folder = tmp_path / "reliability.md", tmp_path / "faults.json", tmp_path / "cells"
    monkeypatch.setattr(cells, "PAGE", page)
    monkeypatch.setattr(cells, "TABLE", faults)
    page.write_text(f"before\n{BEGIN}\nfigures\n{END}\n", encoding="utf-8")
    results = folder / "staleness_0_steps_6" / "chaos.json"
    results.parent.mkdir(parents=True)
    fault = {"fault": "actor@update", "run": "faults_1", "step": 3, "struck": True}
    for outcomes in (None, [], [fault]):
        assert "figures" in page.read_text(encoding="utf-8")
        assert not faults.exists()
        if outcomes is not None:
            results.write_text(json.dumps({"arguments": [], "outcomes": outcomes}), encoding="utf-8")
        cells.write_docs(folder)
    assert "**1 faults struck**" in page.read_text(encoding="utf-8")
    assert json.loads(faults.read_text(encoding="utf-8"))["staleness"]["0"]
