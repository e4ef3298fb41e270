"""Files that a command cannot write cost one line, not a traceback."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlsdk.cli import main


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as left:
        main(["compare", *runs, "-o", str(tmp_path / "file" / "page.html")])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith(f"error: '{tmp_path}/file'") or said.startswith(f"error: '{tmp_path}/file/page.html'")
    assert "this is a file, but a folder is needed" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "said", "code"),
    [
        (errno.EACCES, "ls -ld", 2),
        (errno.EROFS, "choose another folder", 2),
        (errno.EISDIR, "this is a folder, but a file is needed", 2),
        (errno.ENOSPC, "df -h", 1),
        (errno.EIO, "TRACEBACK", 1),
    ],
)
def test_the_line_says_what_to_do(
    number: int,
    said: str,
    code: int,
    runs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, "no", f"{runs[0]}/report.html")

    monkeypatch.setattr("rlsdk.views.report.page.atomic_write_text", fails)
    with pytest.raises(SystemExit) as left:
        main(["report", runs[0]])
    printed = capsys.readouterr().err
    assert (left.value.code, printed.count("\n")) == (code, 1)
    assert printed.startswith(f"error: '{runs[0]}/report.html': no; ")
    assert said in printed
