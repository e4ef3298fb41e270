"""The pictures of the pages are those that the schedule, the planner, the placement and the losses give today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.pictures.__main__ import FOLDER, PICTURES, main  # noqa: E402
from tools.pictures.reshard import planned  # noqa: E402
from tools.pictures.stream import GROUPS, STEPS, record  # noqa: E402


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date_well_formed_and_on_the_page(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text == PICTURES[name](), "run: make pictures"
    assert ElementTree.fromstring(text).attrib["role"] == "img"
    assert any(
        f"](pictures/{name})" in (ROOT / "docs" / page).read_text() for page in ("concepts.md", "distillation.md")
    )


def test_a_picture_that_is_out_of_date_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.pictures.__main__.FOLDER", tmp_path)
    monkeypatch.setattr("tools.pictures.__main__.PICTURES", {"a.svg": lambda: "<svg/>"})
    assert main(check=True) == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("tools.pictures.__main__.ROOT", tmp_path)
    assert main(check=False) == 0
    assert main(check=True) == 0


def test_the_stream_keeps_the_law_that_the_page_states() -> None:
    """A group for step k starts once the weights of step k - 1 - max_staleness are served."""
    for staleness in (0, 1):
        run = record(staleness)
        assert len(run.groups) == GROUPS * STEPS
        for bar in run.groups.values():
            needed = max(bar.step - 1 - staleness, 0)
            assert bar.version >= needed
            assert bar.begin >= run.served_at[needed]
    overlaps = [
        bar for bar in record(1).groups.values() for step in record(1).updates if bar.begin < step.end < bar.end
    ]
    assert overlaps
    assert not [
        bar for bar in record(0).groups.values() for step in record(0).updates if bar.begin < step.end < bar.end
    ]


def test_the_reshard_is_minimal_and_reaches_both_workers_of_both_replicas() -> None:
    source, target, plan = planned()
    assert (len(source), len(target)) == (8, 4)
    assert plan.moved_bytes == plan.lower_bound_bytes
    picture = (FOLDER / "reshard.svg").read_text()
    assert f"{plan.num_bytes / 1e9:.1f} GB in all" in picture
    assert len(re.findall(r"<path ", picture)) == 16
