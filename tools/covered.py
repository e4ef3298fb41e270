"""Runs pytest and takes down which lines of some folders ran: `python tools/covered.py PYTEST-ARGUMENTS`.

slipcover puts marks into the code of those folders. A tracer, as coverage.py's before Python 3.12, slows down whatever
runs, torch's imports included: tests took up to half as long again.

Processes that the tests start by multiprocessing take part: they run their parent's main file first, which is this one.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from multiprocessing import util
from pathlib import Path

from slipcover import FileMatcher, ImportManager, Slipcover, wrap_pytest

SOURCES = "COVERED_SOURCES"
"""Environment variable: the folders, comma-separated."""
FOLDER = "COVERED_FOLDER"
"""Environment variable: where each process leaves its lines, as JSON."""


def start() -> None:
    """Marks what is imported from here on. Files that no process imports are counted once, by `tools/run_tests.py`."""
    matcher = FileMatcher(sources=os.environ[SOURCES].split(","))
    slipcover = Slipcover()
    if __name__ == "__main__":
        # Processes that tests start rewrite no assertions, and most of them would import pytest for this alone.
        wrap_pytest(slipcover, matcher)
    ImportManager(slipcover, matcher).__enter__()

    def leave() -> None:
        file = Path(os.environ[FOLDER]) / f"{uuid.uuid4().hex}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(slipcover.get_coverage()["files"]), encoding="utf-8")
        part.replace(file)

    util.Finalize(None, leave, exitpriority=0)
    # A process that begins forgets the last words of the one that it comes from.
    util.register_after_fork(slipcover, lambda _: util.Finalize(None, leave, exitpriority=0))


if SOURCES in os.environ:
    start()

if __name__ == "__main__":
    import pytest

    # As `python -m pytest` has it.
    sys.path[0] = os.getcwd()
    sys.exit(pytest.main(sys.argv[1:]))
