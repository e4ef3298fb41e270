"""Runs every test folder in its own pytest process, some at a time, and prints one total; `--coverage`: lines run.

One process per folder: Ray, process groups and signal handlers of one never meet those of another. Much of their time
is waiting for processes to start, so three share two cores well. A test that fails, or a folder whose process died, is
run once more when nothing else runs. What then passes is named at the end, and with `--strict` fails the run, unless it
stands in `tests/unsteady.txt` with a date and a reason.

Where the commit before a landing is known (`--since`, `tools/landing`), engines whose inputs are unchanged run only the
basic requirements of their suites, and of the broken engines that no change reaches an eighth runs. With `--minutes`
broken engines run last, as many as these minutes leave time for. What was left out is named at the end, with the
command that runs it. `--whole` leaves nothing out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from landing.changes import VARIABLE, Parent, find_parent, head_of
from landing.suites import INPUTS, PUBLISHED, UNREPORTED, Tier, tier_of

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.txt"
"""A line each: seconds, suite. The longest begin first, so that none is left to run alone at the end."""
APART = ("tests/testing/test_broken_rollout.py", "tests/testing/test_broken_train.py")
"""Files that run apart from their folder, which would take too long as one."""
ZOO_SECONDS = 4.5
"""Of one broken engine, beside other suites."""
ZOO_LEAST = 20
"""Broken engines of a file that run however late it is."""
JOBS = min(3, 1 + (os.cpu_count() or 1))
"""Folders at a time."""
ENGINE_JOBS = 2
"""Plugins' suites at a time: their ranks wait by spinning, and three of them leave no core to what they wait for."""
ENGINES = {"tests/testing": ("torch", "transformers"), "tests/isolated": (PUBLISHED,)}
"""Suite -> engines whose conformance suites are among its tests; a plugin's own are those of its name."""
HOME = {"vllm": "megatron", "deepspeed": "megatron"}
"""A plugin that is tested in the environment of another, which has all that its own would have."""
ZOO = ROOT / "tests" / "testing" / "whole_zoo.txt"
"""When all broken engines last ran: date, commit."""
LINES = ROOT / ".coverage-lines"
"""Which lines each process ran: `tools/covered.py`."""
REWRITTEN = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
"""The coverage tool is a plugin of pytest, too, and there before it."""
UNSTEADY = ROOT / "tests" / "unsteady.txt"
"""A line each: date, name of a test that may pass only at its second try, and why it is not fixed yet."""
LISTED = re.compile(r"(\d{4}-\d\d-\d\d) \| (.+?) \| (.*\w.*)")
LEAST = 8
"""Files that are named with their coverage."""
MOST_REPEATED = 3
"""More failures than these in one folder are no accident."""
FAILED = re.compile(r"(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?\n")
LEFT_OUT = re.compile(r"LEFT OUT: ((\d+) of \d+ .+)\n")
"""As `rlsdk.testing.suites.report` and `tests/testing/conftest.py` say it."""
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tests that share a process."""

    name: str
    """As a person knows it: a folder of the repository."""
    paths: Sequence[Path]
    basic: Sequence[str] = ()
    """Engines of which only the basic requirements run."""
    since: str = ""
    """Commit before the landing: broken engines that nothing since reaches run by eighths. Empty: all run."""
    most: int | None = None
    """Most broken engines that run."""

    @property
    def timed_as(self) -> str:
        """Its name in the list of durations: a part takes less than the whole."""
        return f"{self.name} in part" if self.basic or self.since or self.most is not None else self.name

    @property
    def engines(self) -> list[str]:
        """Engines whose conformance suites are among these tests."""
        return [name for name in ENGINES.get(self.name, [Path(self.name).name]) if name in INPUTS | UNREPORTED]

    @property
    def plugin(self) -> Path | None:
        """Folder of the plugin that is tested."""
        return self.paths[0] if self.paths[0].parent.name == "plugins" else None

    @property
    def sources(self) -> list[str]:
        """Folders of the repository whose lines are counted."""
        return ["rlsdk", *([f"plugins/{self.plugin.name}/src"] if self.plugin else [])]

    @property
    def python(self) -> Path:
        """A plugin whose engine pins versions that the core does not share (`tested.txt`) has its own environment."""
        name = HOME.get(self.plugin.name, self.plugin.name) if self.plugin else ""
        if not (ROOT / "plugins" / name / "tested.txt").exists():
            return Path(sys.executable)
        python = Path(f"{sys.prefix.removesuffix('-dev')}-{name}") / "bin" / "python"
        if not python.exists():
            sys.exit(f"{self.name} is tested in {python.parent.parent}, which is not there; run: make test")
        return python


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What pytest said."""

    suite: Suite
    code: int
    counts: Counter[str]
    bad: Sequence[str]
    """Tests that failed, as pytest names them."""
    output: str
    left_out: Sequence[str] = ()
    """What of the tests did not run, a line each, as pytest said it."""
    seconds: float = 0.0


def main() -> None:
    # A shell's background job has SIGINT ignored, and so has all that it starts: tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = read_arguments()
    listed = unsteady(UNSTEADY)
    chosen = [s for s in suites() if not args.only or any(word in s.name for word in args.only)]
    until = math.inf if args.whole or args.minutes is None else time.monotonic() + 60 * args.minutes
    parent = Parent(commit=None, why="--whole") if args.whole else find_parent(ROOT, args.since)
    tiers = {name: tier_of(ROOT, name, parent) for suite in chosen for name in suite.engines}
    for tier in tiers.values():
        print(f"suite of {tier.engine}: {'in full' if tier.full else 'basic requirements'}: {tier.why}", flush=True)
    chosen = longest_first([narrowed(suite, tiers, parent) for suite in chosen])
    shutil.rmtree(LINES, ignore_errors=True)
    LINES.mkdir()
    for suite in chosen:
        _ = suite.python  # Says at once when an environment is missing.
    start = time.monotonic()
    outcomes: list[Outcome] = []
    if until < math.inf:
        chosen.sort(key=lambda suite: suite.name in APART)
    for outcome in run_side_by_side(chosen, args.jobs, until, covered=args.coverage):
        outcomes.append(show(outcome))
    if args.record:
        record(DURATIONS, outcomes)
        record_zoo(ZOO, outcomes)
    passed_late = run_again(outcomes, listed, covered=args.coverage, strict=args.strict)
    if args.coverage:
        print(coverage(sorted({source for suite in chosen for source in suite.sources})))
    print_end(outcomes, report_unsteady(outcomes, listed, passed_late), tiers, time.monotonic() - start)
    sys.exit(1 if any(outcome.code for outcome in outcomes) else 0)


def narrowed(suite: Suite, tiers: Mapping[str, Tier], parent: Parent) -> Suite:
    """The suite, of whose tests those run that this landing has to run."""
    basic = [name for name in suite.engines if not tiers[name].full]
    return replace(suite, basic=basic, since=parent.commit or "" if suite.name in APART else "")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="folders whose name holds one of these words; none: all")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"folders at a time; unset: {JOBS}")
    strict = "a test that passes only at its second try fails the run, unless listed"
    parser.add_argument("--strict", action="store_true", help=strict)
    recorded = f"write seconds into {DURATIONS.relative_to(ROOT)}, and when all broken engines ran"
    parser.add_argument("--record", action="store_true", help=recorded)
    parser.add_argument("--coverage", action="store_true", help="count which lines ran; every process takes longer")
    parser.add_argument("--since", metavar="COMMIT", help=f"the commit before the landing; unset: ${VARIABLE}, or "
                        "where this branch left origin's; nothing is left out where neither is known")  # fmt: skip
    parser.add_argument("--whole", action="store_true", help="leave nothing out")
    minutes = "broken engines run last, and as many as fit into these minutes from now; unset: all that are to run"
    parser.add_argument("--minutes", type=float, help=minutes)
    return parser.parse_args()


def run_side_by_side(
    chosen: Sequence[Suite], jobs: int, until: float = math.inf, *, covered: bool
) -> Iterator[Outcome]:
    """Runs the suites in this order, save that a plugin's waits while `ENGINE_JOBS` others run; as they end.

    Args:
        chosen: the suites.
        jobs: suites at a time.
        until: moment of `time.monotonic` by which the broken engines should have run.
        covered: count which lines run.
    """
    waiting = list(chosen)
    running: dict[Future[Outcome], Suite] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            while len(running) < jobs and (suite := next_suite(waiting, running.values())):
                waiting.remove(suite)
                running[pool.submit(run, in_time(suite, until), covered=covered)] = suite
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                del running[done]
                yield done.result()


def in_time(suite: Suite, until: float) -> Suite:
    """The suite, of whose broken engines no more run than there is time for."""
    if suite.name not in APART or until == math.inf:
        return suite
    return replace(suite, most=max(ZOO_LEAST, int((until - time.monotonic()) / ZOO_SECONDS)))


def next_suite(waiting: Sequence[Suite], running: Collection[Suite]) -> Suite | None:
    """The first that may begin beside those that run."""
    engines_run = sum(suite.plugin is not None for suite in running)
    return next((suite for suite in waiting if suite.plugin is None or engines_run < ENGINE_JOBS), None)


def run_again(outcomes: list[Outcome], listed: Collection[str], *, covered: bool, strict: bool) -> list[str]:
    """Gives what failed a second try, and puts an outcome that may pass by it into its place; returns what passed."""
    passed_late: list[str] = []
    for at, outcome in enumerate(outcomes):
        if what := second_try(outcome):
            print(f"== once more: {' '.join(what)}", flush=True)
            again = show(run(outcome.suite, only=outcome.bad, covered=covered))
            if not again.code:
                passed_late += what
                if not strict or set(listed) >= set(what):
                    outcomes[at] = joined(outcome, again)
    return passed_late


def print_end(
    outcomes: Sequence[Outcome], unsteady_lines: Sequence[str], tiers: Mapping[str, Tier], seconds: float
) -> None:
    """What a person reads at the end of a run."""
    for line in [*unsteady_lines, *report_left_out(outcomes, tiers)]:
        print(line)
    failed = [outcome.suite.name for outcome in outcomes if outcome.code]
    in_part = [outcome.suite.name for outcome in outcomes if outcome.left_out]
    print(f"{seconds:.0f} s; suites that failed: {failed or 'none'}{f'; run in part: {in_part}' if in_part else ''}")
    totals = sum((outcome.counts for outcome in outcomes), Counter[str]())
    died = sum(1 for outcome in outcomes if outcome.code and not outcome.bad)
    num_bad = totals["failed"] + totals["error"] + totals["errors"] + died
    print(f"{totals['passed']} passed, {num_bad} failed, {totals['skipped']} skipped")


def report_left_out(outcomes: Sequence[Outcome], tiers: Mapping[str, Tier]) -> list[str]:
    """What did not run, why, when it last did, and the command for it."""
    lines = []
    for outcome in outcomes:
        for what in outcome.left_out:
            names = [name for name in outcome.suite.engines if f" of {name} " in what] or outcome.suite.engines[:1]
            lines.append(f"NOT RUN: {what}: {tiers[names[0]].why if names else whole_zoo(ZOO)}")
    return lines


def suites() -> list[Suite]:
    """Every folder of tests."""
    folders = [path for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))]
    folders += [path.parent for path in (ROOT / "plugins").glob("*/tests")]
    apart = {ROOT / name for name in APART}
    named = [Suite(name=name_of(path), paths=[path]) for path in [*sorted(folders), *sorted(apart)]]
    named = [replace(s, paths=sorted({*s.paths[0].glob("test_*.py")} - apart)) if holds(s, apart) else s for s in named]
    named.append(Suite(name="tests", paths=sorted((ROOT / "tests").glob("test_*.py"))))
    return named


def longest_first(chosen: Sequence[Suite]) -> list[Suite]:
    """The suites in the order in which they begin."""
    known = durations(DURATIONS)
    # One that is new may be long.
    return sorted(chosen, key=lambda suite: -known.get(suite.timed_as, known.get(suite.name, math.inf)))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def holds(suite: Suite, files: Collection[Path]) -> bool:
    """Whether one of the files is directly in the suite's folder."""
    return suite.paths[0] in {file.parent for file in files}


def durations(file: Path) -> dict[str, float]:
    """Suite -> seconds that it took when it was last recorded."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    entries = (line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in entries}


def record(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes how long these suites took; keeps the others' lines."""
    known = durations(file) | {outcome.suite.timed_as: round(outcome.seconds) for outcome in outcomes}
    lines = [f"{seconds:6.0f} {name}\n" for name, seconds in sorted(known.items(), key=lambda one: -one[1])]
    file.write_text(
        "# Seconds of each suite, which decide the order: written by `tools/run_tests.py --record`.\n" + "".join(lines),
        encoding="utf-8",
    )


def record_zoo(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes when all broken engines ran and none was missed, if that was now."""
    if {o.suite.name for o in outcomes if not o.code and not o.left_out} >= set(APART):
        file.write_text(f"{date.today().isoformat()} {head_of(ROOT)[:8]}\n", encoding="utf-8")


def whole_zoo(file: Path) -> str:
    """When all broken engines last ran, and how they do."""
    day, commit = file.read_text(encoding="utf-8").split() if file.exists() else ("", "")
    return f"all ran {f'on {day} at commit {commit}' if day else 'never, as far as is recorded'}; `make zoo` runs all"


def run(suite: Suite, only: Sequence[str] = (), *, covered: bool = False) -> Outcome:
    """Runs a folder's tests, or some of them, to their end."""
    command = [
        str(suite.python), *([str(ROOT / "tools" / "covered.py"), "-W", REWRITTEN] if covered else ["-m", "pytest"]),
        *(only or map(str, suite.paths)),
        *(["--rlsdk-basic", ",".join(suite.basic)] if suite.basic else []),
        # No deadline for single examples: machines that are shared pause whenever they like.
        "--hypothesis-profile=ci", "-p", "no:cacheprovider",
        "--durations=6", "--durations-min=5", "-rfEs",
    ]  # fmt: skip
    # One thread each: what runs side by side shares few cores, and idle threads of torch spin.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "ZOO_SINCE": suite.since, "ZOO_MOST": str(suite.most or "")}
    if covered:
        environment |= {"COVERED_SOURCES": ",".join(suite.sources), "COVERED_FOLDER": str(LINES)}
    # Environments for tests are not compiled ahead: what one process had to compile, the next finds compiled.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    counts: Counter[str] = Counter()
    bad: list[str] = []
    left_out: list[str] = []
    for line in done.stdout.splitlines(keepends=True):
        if name := FAILED.fullmatch(line):
            bad.append(name[1])
        if what := LEFT_OUT.fullmatch(line):
            left_out.append(what[1])
        if " in " in line and (found := COUNT.findall(line)):
            counts = Counter({word: int(number) for number, word in found})
    return Outcome(
        suite=suite, code=done.returncode, counts=counts, bad=bad, output=done.stdout, left_out=left_out,
        seconds=time.monotonic() - start,
    )  # fmt: skip


def second_try(outcome: Outcome) -> list[str]:
    """What of a folder is run once more: nothing where all passed, or where too much failed."""
    if not outcome.code or len(outcome.bad) > MOST_REPEATED:
        return []
    return list(outcome.bad) or [f"all of {outcome.suite.name} (exit code {outcome.code})"]


def joined(first: Outcome, again: Outcome) -> Outcome:
    """A folder whose failures passed at their second try."""
    kept = Counter(passed=first.counts["passed"], skipped=first.counts["skipped"])
    counts = kept + again.counts if first.bad else again.counts
    return replace(first, code=0, counts=counts, bad=(), output="", left_out=first.left_out or again.left_out)


def unsteady(file: Path) -> dict[str, str]:
    """Test that may need a second try -> since when, and why it is not fixed yet."""
    found = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            if (entry := LISTED.fullmatch(line.strip())) is None:
                sys.exit(f"{file.name}, line {number}: expected `YYYY-MM-DD | test | reason`, not {line!r}")
            found[entry[2]] = f"since {entry[1]} ({entry[3]})"
    return found


def report_unsteady(outcomes: Sequence[Outcome], listed: dict[str, str], passed_late: Sequence[str]) -> list[str]:
    """What a person reads at the end of a run."""
    failed = {name for outcome in outcomes for name in outcome.bad}
    lines = [
        f"PASSED ONLY AT THE SECOND TRY: {name}. Fix it; until then, say why in {name_of(UNSTEADY)}: "
        f"{date.today().isoformat()} | {name} | reason"
        for name in passed_late
        if name not in listed
    ]
    for name, why in listed.items():
        now = "needed a second try" if name in passed_late else "failed twice" if name in failed else "passed at once"
        lines.append(f"unsteady {why}, {now}: {name}")
    return lines


def show(outcome: Outcome) -> Outcome:
    """Prints what a folder's tests said, all at once."""
    print(f"== {outcome.suite.name}, {outcome.seconds:.0f} s\n{outcome.output}", end="", flush=True)
    if outcome.code and not outcome.bad:
        print(f"{outcome.suite.name}: no test failed, but its process ended with {outcome.code}", flush=True)
    return outcome


def coverage(sources: Sequence[str]) -> str:
    """Of all folders together: the share of lines that ran, and the files with the smallest."""
    ran: dict[str, set[int]] = {}
    lines = lines_of(sources)
    for part in LINES.glob("*.json"):
        for name, found in json.loads(part.read_text(encoding="utf-8")).items():
            ran.setdefault(name, set()).update(found["executed_lines"])
            lines.setdefault(name, set()).update(found["executed_lines"], found["missing_lines"])
    shares = sorted((len(ran.get(name, ())) / len(lines[name]), name) for name in lines if lines[name])
    num_ran, num_lines = (sum(map(len, of.values())) for of in (ran, lines))
    least = [f"{share:5.0%}  {name}" for share, name in shares[:LEAST]]
    return "\n".join([*least, f"coverage: {num_ran / max(num_lines, 1):.1%} of {num_lines} lines"])


def lines_of(sources: Sequence[str]) -> dict[str, set[int]]:
    """Every file of these folders -> its lines: also of those that no process imported."""
    from slipcover import Slipcover

    os.chdir(ROOT)  # slipcover names files from here
    files = Slipcover(source=list(sources)).get_coverage()["files"]
    return {name: {*found["executed_lines"], *found["missing_lines"]} for name, found in files.items()}


if __name__ == "__main__":
    main()
