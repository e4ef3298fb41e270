"""Notes of a run: written by a command or from Python, shown by the pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import write_run

import rlsdk
from rlsdk.cli import main
from rlsdk.interfaces import ConfigError
from rlsdk.system.files import UnfitFileError
from rlsdk.views.report import write_comparison, write_report
from rlsdk.views.report.live import LivePage
from rlsdk.views.report.notes import MAX_CHARS, NOTES_FILE, add_note, read_notes


def left_with(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int | None)
    return left.value.code or 0


def test_a_note_is_on_every_page_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (write_run(tmp_path / name, steps=3) for name in ("first", "second"))
    page = LivePage(first)
    before = page.mark
    assert left_with("note", first) == 0
    assert "no notes" in capsys.readouterr().out
    assert left_with("note", first, "the rate", "is <b>halved</b>") == 0
    assert "step 3  the rate is <b>halved</b>" in capsys.readouterr().out
    assert page.mark != before
    shown = "the rate is &lt;b&gt;halved&lt;/b&gt;"
    assert shown in page.whole()
    assert shown in write_report(first)[0].read_text()
    assert shown in write_comparison([first, second], tmp_path / "both.html").read_text()
    assert "<h2>Notes</h2>" not in write_report(second)[0].read_text()


def test_notes_from_python_are_in_the_order_of_their_writing(tmp_path: Path) -> None:
    run = rlsdk.Run(write_run(tmp_path / "run", steps=2))
    run.note("one\nline")
    run.note("two")
    assert [(note.text, note.step) for note in run.notes] == [("one line", 2), ("two", 2)]


def test_what_is_no_note_is_refused_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    for text in (" \n", "x" * (MAX_CHARS + 1)):
        with pytest.raises(ConfigError, match="expected 1 to 2000"):
            add_note(folder, text)
    with pytest.raises(ConfigError, match="holds no run"):
        add_note(tmp_path, "x")
    (folder / NOTES_FILE).write_text('{"text": 3}\n[1]\nno json\n' + json.dumps({"text": "kept", "step": "x"}) + "\n")
    assert [(note.text, note.step, note.time) for note in read_notes(folder)] == [("kept", None, "")]


def test_a_link_in_place_of_the_notes_is_not_followed(tmp_path: Path) -> None:
    folder, outside = write_run(tmp_path / "run", steps=1), tmp_path / "outside"
    outside.write_text("")
    (folder / NOTES_FILE).symlink_to(outside)
    with pytest.raises(UnfitFileError):
        add_note(folder, "x")
    with pytest.raises(UnfitFileError):
        read_notes(folder)
    assert outside.read_text() == ""
