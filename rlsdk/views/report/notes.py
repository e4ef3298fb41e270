"""Notes of a run: lines that its user writes and its pages show."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.kit.files.write_errors import writing
from rlsdk.system.files import check_inside, read_json_lines
from rlsdk.trainer.checkpoints.run_folder import CONFIG_FILE
from rlsdk.trainer.tracking.trackers import read_metrics
from rlsdk.views.report.markup import escaped, number_of

NOTES_FILE = "notes.jsonl"
"""In a run's folder: `time`, `step` (the newest one, or null) and `text` of each note."""
MAX_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Note:
    """A line about a run."""

    text: str
    time: str = ""
    """When it was written, ISO 8601."""
    step: int | None = None
    """The newest step then."""

    @property
    def place(self) -> str:
        """When it was written, in words."""
        return " · ".join([self.time[:16].replace("T", " "), *([f"step {self.step}"] if self.step is not None else [])])


def add_note(run_dir: Path, text: str) -> Note:
    """Appends a note to a run, which may be running.

    Raises:
        ConfigError: the folder holds no run, or the text is empty or too long.
        UnfitFileError: the file of notes is a link.
        OutputError: the note cannot be written.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run: there is no {CONFIG_FILE}; give a run's folder (runs/NAME)")
    line = " ".join(text.split())
    if not 0 < len(line) <= MAX_CHARS:
        raise ConfigError(f"a note has {len(line)} characters: expected 1 to {MAX_CHARS}")
    check_inside(run_dir, run_dir / NOTES_FILE)
    note = Note(text=line, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), step=_newest_step(run_dir))
    record = json.dumps({"time": note.time, "step": note.step, "text": note.text}) + "\n"
    with writing("the note", run_dir):
        handle = os.open(run_dir / NOTES_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.write(handle, record.encode("utf-8"))  # one write, so that two notes at once are two lines
        finally:
            os.close(handle)
    return note


def _newest_step(run_dir: Path) -> int | None:
    """The newest step of a run; a warm start counts its own steps, until it is over."""
    rows = read_metrics(run_dir)
    trained = [row for row in rows if "reward/mean" in row]
    steps = [number for row in trained or rows if (number := number_of(row.get("step"))) is not None]
    return int(max(steps)) if steps else None


def notes_of(lines: Sequence[Mapping[str, Any]]) -> list[Note]:
    """The notes in the lines of a file, which are untrusted."""
    found = []
    for line in lines:
        text, step = line.get("text"), number_of(line.get("step"))
        if isinstance(text, str) and text:
            moment = line.get("time")
            found.append(
                Note(
                    text=text[:MAX_CHARS],
                    time=moment if isinstance(moment, str) else "",
                    step=None if step is None else int(step),
                )
            )
    return found


def read_notes(run_dir: Path) -> list[Note]:
    """The notes of a run, the first one first.

    Raises:
        UnfitFileError: the file is a link, or no regular file.
    """
    file = run_dir / NOTES_FILE
    check_inside(run_dir, file)
    return notes_of(read_json_lines(file))


def notes_section(notes: Sequence[Note]) -> str:
    """The notes on a run's page; empty without notes."""
    items = "".join(f'<li>{escaped(note.text)} <span class="quiet">{escaped(note.place)}</span></li>' for note in notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""
