"""Inputs by the thousand: the fuzz tests of this repository, with more examples, from a seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.campaign.runs import ROOT

TRIED = "RLSDK_FUZZ_TRIED"
"""Environment variable: the file into which `tests/fuzz/conftest.py` writes how many inputs each property saw."""
EXAMPLES = "RLSDK_FUZZ_EXAMPLES"
"""Environment variable: of each property."""


@dataclass(frozen=True)
class Tried:
    """One property, and the inputs that it was tried on."""

    what: str
    inputs: int
    held: bool


def try_inputs(seed: int, examples: int, timeout_s: float) -> tuple[Sequence[Tried], float]:
    """Runs the fuzz tests once; what they found, and the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tried.json"
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", str(ROOT / "tests" / "fuzz"), "-q", "-p", "no:cacheprovider",
                f"--hypothesis-seed={seed}", "-p", "no:randomly",
            ],
            cwd=ROOT, env={**os.environ, TRIED: str(file), EXAMPLES: str(examples), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if not file.exists():
            raise RuntimeError(f"the fuzz tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(file.read_text(encoding="utf-8"))
    tried = [Tried(what=what, inputs=entry["inputs"], held=entry["held"]) for what, entry in sorted(found.items())]
    return tried, time.monotonic() - start
