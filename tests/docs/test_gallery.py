"""docs/gallery.md: reports of real runs, and nothing of the machine that made them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from rlsdk.config import load_config
from rlsdk.registry import Registry

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.gallery import COMPARED, FOLDER, PAGE, RUNS, copy_page  # noqa: E402

PAGES = sorted(FOLDER.glob("*.html"))
MAX_BYTES = 400_000


def test_every_run_has_its_section_report_and_curves() -> None:
    text = PAGE.read_text()
    assert {page.stem for page in PAGES} == {shown.name for shown in RUNS} | {"comparison"}
    for shown in RUNS:
        assert f"## {shown.title}" in text
        assert f"](gallery/{shown.name}.html)" in text
        assert (FOLDER / f"{shown.name}.svg").read_text().startswith("<svg")
    assert re.findall(r"greedy [\d.]+% → [\d.]+%", text)
    assert f"rlsdk compare {' '.join(f'runs/{name}' for name in COMPARED)}" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_report_is_small_private_and_whole(page: Path) -> None:
    text = page.read_text()
    assert len(text) < MAX_BYTES
    assert "Content-Security-Policy" in text
    assert not re.findall(r"/(?:tmp|home|root|work|Users)/\S{0,40}", text)
    assert "<h2>Curves</h2>" in text or "Curves" in text


def test_commands_of_the_page_are_ones_that_the_configuration_takes() -> None:
    text = re.sub(r" *\\\n *", " ", PAGE.read_text())
    trains = [line for line in text.splitlines() if line.startswith("rlsdk train")]
    assert len(trains) == len(RUNS)
    for line in trains:
        flags = shlex.split(line)[2:]
        files = [ROOT / flags.pop(flags.index("--config") + 1)] if "--config" in flags else []
        load_config(files, [flag for flag in flags if flag != "--config"], Registry.discover(), sections=())


def test_a_path_of_this_machine_is_not_published(tmp_path: Path) -> None:
    source, target = tmp_path / "report.html", tmp_path / "out.html"
    source.write_text(f"<p>{tmp_path}/runs/a {tmp_path}</p>")
    copy_page(source, target, tmp_path)
    assert target.read_text() == "<p>runs/a .</p>"
    source.write_text(f"<p>{ROOT}/rlsdk</p>")
    with pytest.raises(ValueError, match="publish nothing of this machine"):
        copy_page(source, target, tmp_path)
