"""The folder of a stranger's run: no file in it makes a command wait, fill the memory, or show what is elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from made_run import write_run

from rlsdk.system.files import UnfitFileError
from rlsdk.trainer.tracking import trackers
from rlsdk.views.report import write_comparison, write_report
from rlsdk.views.report.live import LivePage
from rlsdk.views.report.record import FILES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return write_run(tmp_path / "run", steps=3)


def put(place: Path, kind: str) -> None:
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "link":
        (place.parent.parent / "secret").write_text("api_key: sk-123\n")
        place.symlink_to(place.parent.parent / "secret")
    else:
        with place.open("wb") as file:
            file.truncate(1 << 40)


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "huge"])
@pytest.mark.parametrize("name", FILES)
def test_pages_name_the_file_that_is_none_and_show_nothing_of_it(run: Path, name: str, kind: str) -> None:
    put(run / name, kind)
    compare = lambda: write_comparison([run, run], run.parent / "compare.html")  # noqa: E731
    for make in (lambda: write_report(run), *([] if name == "timeline.jsonl" else [compare])):
        with pytest.raises(UnfitFileError) as caught:
            make()
        assert caught.value.filename == str(run / name)
    page = LivePage(run).whole()
    assert name in page
    assert "No step is done yet" not in page
    assert "sk-123" not in page
    assert not (run / "report.html").exists()


def test_the_command_says_which_file_and_ends_with_2(run: Path) -> None:
    put(run / "samples.jsonl", "pipe")
    command = [sys.executable, "-m", "rlsdk.cli", "report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: '{run / 'samples.jsonl'}': is a named pipe, expected a regular file\n"


def test_a_line_without_an_end_is_not_read_into_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MAX_READ_BYTES", 1 << 41)
    put(run / "metrics.jsonl", "huge")
    with pytest.raises(UnfitFileError, match="line 1 has more than"):
        trackers.read_metrics(run)


def test_a_resumed_run_does_not_wait_on_a_pipe(run: Path) -> None:
    put(run / "metrics.jsonl", "pipe")
    found: list[BaseException] = []

    def resume() -> None:
        try:
            trackers.drop_repeated(run / "metrics.jsonl", 1, warm_start=False)
        except UnfitFileError as error:
            found.append(error)

    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    thread.join(20)
    assert len(found) == 1
