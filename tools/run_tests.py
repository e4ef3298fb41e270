"""Runs every test folder in its own pytest process, in turn, then prints one coverage figure and one total.

One process per folder: Ray, process groups and signal handlers of one never meet those of another. A test that fails is
run once more by itself: one that then passes does not stop a landing, but is named at the end, for somebody to mend.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/tests"))
FOLDERS = [*sorted(p for p in (ROOT / "tests").iterdir() if any(p.glob("**/test_*.py"))), *PLUGINS]
MOST_REPEATED = 3
"""More failures than these are no accident."""
LOOSE = sorted((ROOT / "tests").glob("test_*.py"))
FAILED = re.compile(r"(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?\n")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")


def main() -> None:
    only = sys.argv[1:]
    suites = [[str(path) for path in LOOSE], *([str(folder)] for folder in FOLDERS)]
    chosen = [s for s in suites if s and (not only or any(word in path for word in only for path in s))]
    (ROOT / ".coverage").unlink(missing_ok=True)
    totals: Counter[str] = Counter()
    failed: list[str] = []
    unsteady: list[str] = []
    start = time.monotonic()
    for suite in chosen:
        names = " ".join(str(Path(path).relative_to(ROOT)) for path in suite)
        print(f"== {names}", flush=True)
        code, counts, bad = _run(suite)
        if code == 1 and 0 < len(bad) <= MOST_REPEATED:
            print(f"== once more: {' '.join(bad)}", flush=True)
            code, again, _ = _run(suite, only=bad)
            if not code:
                unsteady += bad
                counts = Counter(passed=counts["passed"] + again["passed"], skipped=counts["skipped"])
        totals.update(counts)
        if code:
            failed.append(names)
    _coverage()
    if unsteady:
        print(f"PASSED ONLY AT THE SECOND TRY, mend them: {' '.join(unsteady)}")
    print(f"{time.monotonic() - start:.0f} s; suites that failed: {failed or 'none'}")
    num_bad = totals["failed"] + totals["error"] + totals["errors"]
    print(f"{totals['passed']} passed, {num_bad} failed, {totals['skipped']} skipped")
    sys.exit(1 if failed else 0)


def _run(paths: list[str], only: Sequence[str] = ()) -> tuple[int, Counter[str], list[str]]:
    """Exit status, counts by outcome, and the tests that failed, of these folders or of some tests in them."""
    command = [
        str(_python(paths)),
        "-m",
        "pytest",
        *(only or paths),
        *(f"--cov={package}" for package in _measured(paths)),
        # No deadline for single examples: machines that are shared pause whenever they like.
        "--hypothesis-profile=ci",
        "--cov-report=",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "COVERAGE_FILE": str(ROOT / ".coverage")}
    process = subprocess.Popen(
        [*command, "--cov-append"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    counts: Counter[str] = Counter()
    bad: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if name := FAILED.fullmatch(line):
            bad.append(name[1])
        if " in " in line and (found := COUNT.findall(line)):
            counts = Counter({word: int(number) for number, word in found})
    return process.wait(), counts, bad


def _python(paths: list[str]) -> Path:
    """A plugin whose engine pins versions that the core does not share (`tested.txt`) has an environment of its own."""
    folder = Path(paths[0])
    if not (folder / "tested.txt").exists():
        return Path(sys.executable)
    python = Path(f"{sys.prefix.removesuffix('-dev')}-{folder.name}") / "bin" / "python"
    if not python.exists():
        sys.exit(f"{folder.relative_to(ROOT)} is tested in {python.parent.parent}, which is not there; run: make test")
    return python


def _measured(paths: list[str]) -> list[str]:
    """The core, and a plugin's own package in its own folder."""
    plugins = [Path(path).name for path in paths if Path(path).parent.name == "plugins"]
    return ["rlsdk", *(f"rlsdk_{name}" for name in plugins)]


def _coverage() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "coverage", "report", "--skip-covered", "--sort=cover"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print("\n".join(result.stdout.splitlines()[-12:]))


if __name__ == "__main__":
    main()
