"""`rlsdk note RUN TEXT`: a line about a run, which its pages show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsdk.system.printable import printable


def run(run_dir: Path, words: Sequence[str]) -> None:
    """Writes a note; without words, prints those of the run.

    Raises:
        ConfigError: the folder holds no run, or the text is too long.
    """
    from rlsdk.views.report.notes import add_note, read_notes

    notes = [add_note(run_dir, " ".join(words))] if words else read_notes(run_dir)
    for note in notes:
        print(printable(f"{note.place}  {note.text}"))
    if not notes:
        print(printable(f"no notes; write one: rlsdk note {run_dir} TEXT"))
