"""Makes one small change in the sources of a right engine, runs its conformance suite, and says what saw it.

    python -m tools.mutants --engine transformers --seed 1 --count 40

Changes are drawn by the seed from all that `operators` knows, so nobody chose them. A line of JSON for each goes to
`mutants/ENGINE-SEED-DIGEST.jsonl`; a second call goes on behind the last. The digest is of the sources: after an edit
of the engine, the suite or this tool a call begins anew. A mutant is

- `caught` by a requirement that failed (or `hung`, beyond the time limit), which is what the figure counts;
- `slow` beyond the time limit, where the right engine takes more than half of it, too: it says nothing, give more;
- `obvious` where the first requirements fail one and all: it serves nothing, and no kit is needed to see that;
- `survived`, also where no requirement runs the line. Somebody has to read those: many change nothing that the
  interfaces promise (a size of a buffer, a second check), and the rest are holes of the kit.

What somebody has read beforehand need not run: a line `NUMBER REASON` in a file of `tools/mutants/read` makes a mutant
`read`, with its reason in the table; it counts neither way. `--list` shows the numbers, and which file that is: it has
another name once the engine's sources have changed, when the numbers are of other mutants.

To save time, only requirements that ran the changed statement on the right engine are run, the quickest first.
Statements that ran in processes of their own are not seen: for `fsdp` all requirements are run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .engines import ENGINES
from .instrument import instrumented
from .operators import Mutant, mutants, mutated

ROOT = Path(__file__).resolve().parents[2]
TEST = "test_mutants.py"
OPTIONS = ("-q", "-p", "rlsdk.testing.plugin", "-p", "no:cacheprovider", "--timeout", "240")
"""Of pytest."""
READ = Path(__file__).with_name("read")
"""Written by hand, and therefore kept."""
SLACK = 2.0
"""Times as long as the right engine took: a mutant that takes no longer may be as right, on a busier machine."""


class Bench:
    """A copy of the tree in which one file at a time is changed, and the suite that runs on it."""

    def __init__(self, name: str, folder: Path, limit_s: float, most_s: float) -> None:
        self.name, self.engine, self.folder, self.limit_s, self.most_s = name, ENGINES[name], folder, limit_s, most_s
        self.digest = digest(name, with_suite=True)
        self.tree = folder / f"tree-{name}"
        shutil.rmtree(self.tree, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("rlsdk", "plugins/fsdp/src"):
            shutil.copytree(ROOT / part, self.tree / part, ignore=ignored)
        suite = self.engine.suite
        (self.tree / TEST).write_text(
            f"from rlsdk.testing import {suite}\n\n\nclass TestMutant({suite}):\n"
            f"    {self.engine.settings}\n\n\ndel {suite}\n"
        )
        (self.tree / "pytest.ini").write_text("[pytest]\n")
        # Read once: whoever edits them meanwhile gets figures of what was there.
        self.plain = {path: (self.tree / path).read_text() for path in self.engine.files}
        self.noted = {path: instrumented(plain, path) for path, plain in self.plain.items()}

    def trace(self) -> dict[str, Any]:
        """Seconds and statements of every requirement of the right engine; kept in the folder, until sources change."""
        file = self.folder / f"{self.name}-{self.digest}-{self.most_s:g}-trace.json"
        if not file.exists():
            (self.tree / "mutants_hits.py").write_text("hits: set[str] = set()\n")
            for path in self.engine.files:
                (self.tree / path).write_text(self.noted[path])
            print(f"{self.name}: the right engine's suite, once", flush=True)
            report = ROOT / "docs" / "conformance" / f"{self.name}.json"
            slow = slow_ones(report, self.most_s)
            self._fork([TEST], lambda: _plugin("Tracing", file, slow), 3600.0)
            for path, plain in self.plain.items():
                (self.tree / path).write_text(plain)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def row(self, path: str, mutant: Mutant, outcome: str, by: str = "", **more: object) -> dict[str, Any]:
        """A line of the table."""
        change = {"operator": mutant.operator, "before": mutant.before, "after": mutant.after}
        return {"file": path, "line": mutant.line, **change, "outcome": outcome, "by": by, "seconds": 0.0, **more}

    def judge(self, path: str, mutant: Mutant) -> dict[str, Any]:
        """Runs the requirements that may see a mutant."""
        tests, shared = self.trace()["tests"], self.trace()["shared"]
        place, began = f"{path}:{mutant.line}", time.monotonic()
        # What stands outside of functions runs when it is imported.
        anywhere = self.engine.all_run or place in shared or repr(place) not in self.noted[path]
        seeing = [name for name, test in tests.items() if anywhere or place in test["ran"]]
        if not seeing:
            return self.row(path, mutant, "survived", "no requirement runs this line")
        first = [name for name in tests if name.rpartition("::")[2] in self.engine.first]
        seeing = sorted(set(seeing) - set(first), key=lambda name: tests[name]["seconds"])
        report = self.folder / f"failed-{self.name}.json"
        report.unlink(missing_ok=True)
        (self.tree / path).write_text(mutated(self.plain[path], mutant.number))
        try:
            code = self._fork([*first, *seeing], lambda: _plugin("Stopping", report, first), self.limit_s)
        finally:
            (self.tree / path).write_text(self.plain[path])
        failed: dict[str, str] = json.loads(report.read_text()) if report.exists() else {}
        names = [name.rpartition("::")[2] for name in failed]
        outcome = "hung" if code is None and not failed else "caught" if failed or code else "survived"
        if "collection" in failed or (first and set(first) <= failed.keys()):
            outcome = "obvious"
        by = ", ".join(names) or (f"the run ended with {code}" if code else "")
        needed_s = SLACK * seconds_of(tests, [*first, *seeing])
        if outcome == "hung" and needed_s > self.limit_s:
            outcome, by = "slow", f"the right engine takes {needed_s / SLACK:.0f} s for these: --limit {needed_s:.0f}"
        why = next(iter(failed.values()), "")[-160:]
        seconds = round(time.monotonic() - began, 1)
        return self.row(path, mutant, outcome, by, why=why, tests=len(seeing), seconds=seconds)

    def _fork(self, tests: Sequence[str], plugin: Callable[[], object], limit_s: float) -> int | None:
        """pytest in a child, which has torch already: its exit status; None: it had to be killed. It ends with this
        call, however that ends."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setpgid(0, 0)
            os.chdir(self.tree)
            paths = [str(self.tree), str(self.tree / "plugins" / "fsdp" / "src")]
            os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
            sys.path[:0] = paths
            output = os.open(self.folder / f"output-{self.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            import pytest

            os._exit(int(pytest.main([*OPTIONS, *tests], plugins=[plugin()])))
        with suppress(OSError):  # whichever of the two comes first: from now on there is a group to kill
            os.setpgid(child, child)
        ends, ended = time.monotonic() + limit_s, 0
        try:
            while time.monotonic() < ends:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
            return None
        finally:
            if not ended:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _plugin(name: str, *arguments: Any) -> object:
    """Made in the child: it imports what is tested."""
    from . import watching

    return getattr(watching, name)(*arguments)


def seconds_of(tests: Mapping[str, Any], names: Iterable[str]) -> float:
    """That requirements took on the right engine, by a trace."""
    return sum(float(tests[name]["seconds"]) for name in names)


def slow_ones(report: Path, most_s: float) -> set[str]:
    """Requirements that took longer in a report of `rlsdk plugins check`; none where there is no report."""
    suites = json.loads(report.read_text())["suites"] if report.exists() else []
    return {finding["name"] for suite in suites for finding in suite["findings"] if finding["seconds"] > most_s}


def drawn_by(engine: str, seed: int, count: int) -> list[tuple[str, Mutant]]:
    """Changes of an engine's files, by path; with a larger count more of them, behind the same ones."""
    every = [(path, mutant) for path in ENGINES[engine].files for mutant in mutants((ROOT / path).read_text())]
    random.Random(seed).shuffle(every)
    return every[:count]


def digest(engine: str, *, with_suite: bool = False) -> str:
    """Of the sources that decide what is drawn; `with_suite`: and of what judges it, so of all that a result is of."""
    here = Path(__file__).parent
    sources = [*(ROOT / path for path in ENGINES[engine].files), here / "operators.py"]
    if with_suite:
        sources += sorted([*(ROOT / "rlsdk" / "testing").rglob("*.py"), *here.glob("*.py")])
    content = hashlib.sha256()
    for path in sources:
        content.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return content.hexdigest()[:10]


def read_file(engine: str, seed: int) -> Path:
    """Where somebody writes down which mutants need not run."""
    return READ / f"{engine}-{seed}-{digest(engine)}.read"


def reasons(file: Path) -> dict[int, str]:
    """Of mutants that somebody has read, by number."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {int(number): reason for number, _, reason in (line.partition(" ") for line in lines if line.strip())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=1e9, help="no mutant is begun later than this")
    parser.add_argument(
        "--most", type=float, default=math.inf, help="leave out requirements whose last report says more seconds"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one mutant")
    parser.add_argument("--folder", type=Path, default=ROOT / "mutants")
    parser.add_argument("--list", action="store_true", help="shows what was drawn and runs nothing")
    args = parser.parse_args()
    began = time.monotonic()
    if args.list:
        for at, (path, mutant) in enumerate(drawn_by(args.engine, args.seed, args.count)):
            print(f"{at:3} {path}:{mutant.line} {mutant.operator}: {mutant.before} -> {mutant.after}")
        print(f"reasons not to run one: {read_file(args.engine, args.seed).relative_to(ROOT)}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: F401 - for the children
    import transformers  # noqa: F401

    drawn, read = drawn_by(args.engine, args.seed, args.count), reasons(read_file(args.engine, args.seed))
    bench = Bench(args.engine, args.folder.resolve(), args.limit, args.most)
    tests = bench.trace()["tests"]
    if SLACK * (whole_s := seconds_of(tests, tests)) > args.limit:
        print(f"the right engine's suite takes {whole_s:.0f} s: mutants that reach --limit {args.limit:g} may be slow")
    file = args.folder / f"{args.engine}-{args.seed}-{bench.digest}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for at, (path, mutant) in list(enumerate(drawn))[len(rows) :]:
        if time.monotonic() - began > 60 * args.minutes:
            break
        rows.append(bench.row(path, mutant, "read", read[at]) if at in read else bench.judge(path, mutant))
        with file.open("a") as lines:
            lines.write(json.dumps(rows[-1]) + "\n")
        print("{outcome:9} {seconds:6} s {file}:{line} {before!r} -> {after!r} {by}".format_map(rows[-1]), flush=True)
    print(f"{args.engine}, seed {args.seed}: {len(rows)} of {args.count}; {dict(Counter(r['outcome'] for r in rows))}")


if __name__ == "__main__":
    main()
