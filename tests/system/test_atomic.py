"""Files are whole or absent, whenever the writer dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsdk.system.atomic import (
    atomic_path,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
)

WRITER = """
import sys
from pathlib import Path
from rlsdk.system.atomic import atomic_write_bytes
for at in range(10**6):
    atomic_write_bytes(Path(sys.argv[1]), bytes([at % 256]) * 2_000_000)
"""


def test_content_is_replaced_and_no_draft_stays(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "note.txt"
    atomic_write_text(file, "één")
    atomic_write_text(file, "twee")
    assert file.read_text("utf-8") == "twee"
    assert [f.name for f in file.parent.iterdir()] == ["note.txt"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_json_can_be_read_back(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "a.json", {"steps": [1, 2.5, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"steps": [1, 2.5, None]}


def test_a_writer_that_raises_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "note"
    atomic_write_bytes(file, b"old")

    def write_half() -> None:
        with atomic_path(file) as draft:
            draft.write_bytes(b"half of the n")
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_half()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)])
    try:
        while not file.exists():
            assert writer.poll() is None, "the writer ended by itself"
            time.sleep(0.01)
        time.sleep(0.2)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    data = file.read_bytes()
    assert len(data) == 2_000_000
    assert len(set(data)) == 1
