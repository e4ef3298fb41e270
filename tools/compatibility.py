"""Writes docs/compatibility.md from the reports that `make check-NAME` left in docs/conformance/.

`--check` writes nothing and fails where the page is not what the reports say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlsdk.testing.suites.report import Outcome, SuiteReport, read_reports

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "conformance"
PAGE = ROOT / "docs" / "compatibility.md"
MARKS = {
    Outcome.PASSED: "yes",
    Outcome.FAILED: "**no**",
    Outcome.NOT_CLAIMED: "-",
    Outcome.NOT_RUN: "not run",
}
HEAD = """# Compatibility

Written by `make compatibility` from the reports in `docs/conformance/`, which `make check-NAME` makes: nothing here was
typed by hand. *yes*: measured and right. *-*: not claimed, so never asked for. *not run*: claimed, and not measured.
[conformance_kit.md](conformance_kit.md#what-is-checked) says what they are about; the reports hold each one's
sentence and numbers.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = "\n".join(lines(read_reports(sorted(REPORTS.glob("*.json")))))
    if not args.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/compatibility.md is not what docs/conformance/ says; run `make compatibility`")


def lines(suites: Sequence[SuiteReport]) -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    for kind in dict.fromkeys(suite.kind for suite in suites):
        same = [suite for suite in suites if suite.kind == kind]
        yield f"## {kind.capitalize()} backends"
        yield ""
        yield from versions(same)
        yield ""
        yield from matrix(same)
        yield ""


def versions(suites: Sequence[SuiteReport]) -> Iterator[str]:
    """What was tested."""
    yield "| backend | plugin | engine | interface | rlsdk | Python | device | of what is claimed | seconds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for suite in suites:
        engine = ", ".join(f"{name} {version}" for name, version in suite.engine.items()) or "its own"
        claimed = len(suite.findings) - suite.count(Outcome.NOT_CLAIMED)
        cells = (suite.title, suite.plugin, engine, suite.interface, suite.rlsdk, suite.python, suite.device)
        seconds = f"{suite.seconds:.0f}" if suite.seconds else "-"
        yield f"| {' | '.join(cells)} | {suite.count(Outcome.PASSED)}/{claimed} | {seconds} |"


def matrix(suites: Sequence[SuiteReport]) -> Iterator[str]:
    """Requirement by backend."""
    yield f"| requirement | {' | '.join(_label(suite, suites) for suite in suites)} |"
    yield f"|---|{'---|' * len(suites)}"
    for name in dict.fromkeys(found.name for suite in suites for found in suite.findings):
        outcomes = [{f.name: f.outcome for f in suite.findings}.get(name) for suite in suites]
        yield f"| {name} | {' | '.join(MARKS[o] if o is not None else 'not run' for o in outcomes)} |"


def _label(suite: SuiteReport, suites: Sequence[SuiteReport]) -> str:
    """A column's heading: with the engine's version where another column is of another."""
    versions = {tuple(other.engine.values()) for other in suites if other.backend == suite.backend}
    return " ".join([suite.title, *(suite.engine.values() if len(versions) > 1 else ())])


if __name__ == "__main__":
    main()
