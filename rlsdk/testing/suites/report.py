"""Results of a conformance run by suite and requirement: as a table, as JSON, and as one line. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlsdk.testing.suites.requirements import NOT_CLAIMED, Number

SHOWN = 3
"""Largest number of values per requirement in a table; the JSON document has all."""
FORMAT = 1
"""Format version of the JSON document."""


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_CLAIMED = "not claimed"
    """The backend does not claim the requirement's capability."""
    NOT_RUN = "not run"
    """It could not run for another reason, given by the message."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one requirement."""

    name: str
    doc: str
    """What is required: the first paragraph of the requirement's docstring."""
    outcome: Outcome
    capability: str = ""
    """Capability that it belongs to; empty if every backend must meet it."""
    is_new: bool = False
    """Whether the newest interface version added it."""
    numbers: Sequence[Number] = ()
    message: str = ""
    """Why it failed or did not run."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SuiteReport:
    """One suite, run on one backend."""

    suite: str
    """Name of the suite class."""
    backend: str
    kind: str
    plugin: str = ""
    """Distribution and its version."""
    interface: str = ""
    """Interface version that the plugin was written against."""
    rlsdk: str = ""
    engine: dict[str, str] = field(default_factory=dict)
    """Distributions that the plugin names as its engine -> installed version."""
    python: str = ""
    device: str = ""
    variant: str = ""
    """Settings of the suite that differ from the kit's defaults."""
    findings: Sequence[Finding] = ()
    seconds: float = 0.0
    """Seconds that `rlsdk plugins check` took, including starts and ends of processes; 0: not known."""
    left_out: int = 0
    """Requirements that a run of the basic ones left out. What is no whole suite shows nothing of these."""

    def count(self, outcome: Outcome) -> int:
        return sum(finding.outcome is outcome for finding in self.findings)

    @property
    def title(self) -> str:
        """The backend and its settings."""
        return f"{self.backend} ({self.variant})" if self.variant else self.backend

    @property
    def passed(self) -> bool:
        """Whether every requirement of a claimed capability that was not left out ran and passed."""
        return bool(self.findings) and not self.count(Outcome.FAILED) + self.count(Outcome.NOT_RUN)

    @property
    def badge(self) -> str:
        """One line for a README."""
        claimed = len(self.findings) - self.count(Outcome.NOT_CLAIMED)
        engine = "".join(f" · {name} {version}" for name, version in self.engine.items())
        what = "what is claimed (basic requirements only)" if self.left_out else "what is claimed"
        return (
            f"rlsdk {self.rlsdk} conformance · {self.kind} {self.title} · {self.count(Outcome.PASSED)}/{claimed} of "
            f"{what} · {self.plugin}{engine} · interface {self.interface}"
        )


def to_json(suites: Sequence[SuiteReport]) -> str:
    """The document from which compatibility tables are generated."""
    return json.dumps(
        {"format": FORMAT, "suites": [{**asdict(s), "passed": s.passed, "badge": s.badge} for s in suites]},
        indent=1,
        ensure_ascii=False,
    )


def from_json(text: str) -> list[SuiteReport]:
    """Reads what `to_json` wrote.

    Raises:
        ValueError: the document has another format.
    """
    document = json.loads(text)
    if document.get("format") != FORMAT:
        raise ValueError(f"a report of format {document.get('format')!r}; this rlsdk reads format {FORMAT}")
    return [_suite(fields) for fields in document["suites"]]


def _suite(fields: dict[str, Any]) -> SuiteReport:
    findings = [
        Finding(
            **{
                **found,
                "outcome": Outcome(found["outcome"]),
                "numbers": [Number(**number) for number in found["numbers"]],
            }
        )
        for found in fields["findings"]
    ]
    plain = {name: value for name, value in fields.items() if name not in ("findings", "passed", "badge")}
    return SuiteReport(**plain, findings=findings)


def read_reports(paths: Sequence[Path]) -> list[SuiteReport]:
    """The suites of several documents."""
    return [suite for path in paths for suite in from_json(path.read_text(encoding="utf-8"))]


def print_report(suites: Sequence[SuiteReport]) -> None:
    """Prints a table for each suite, the failed requirements with their numbers, and the badge line."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    colours = {
        Outcome.PASSED: "green",
        Outcome.FAILED: "bold red",
        Outcome.NOT_CLAIMED: "dim",
        Outcome.NOT_RUN: "yellow",
    }
    for suite in suites:
        table = Table(
            title=f"{suite.kind} {suite.title}: {suite.plugin}" + (f", {suite.seconds:.0f} s" if suite.seconds else ""),
            title_justify="left",
            box=None,
        )
        for heading in ("requirement", "", "measured", "s"):
            table.add_column(heading, justify="right" if heading == "s" else "left")
        for found in suite.findings:
            colour = colours[found.outcome]
            table.add_row(
                f"{found.name} [dim](new)[/]" if found.is_new else found.name,
                f"[{colour}]{found.outcome}[/]",
                escape("\n".join(_lines(found))),
                f"{found.seconds:.1f}",
            )
        console.print(table)
        for found in suite.findings:
            if found.outcome in (Outcome.FAILED, Outcome.NOT_RUN):
                console.print(f"[bold red]{found.name}[/]: {escape(found.doc)}")
                console.print(f"  {escape(found.message)}")
        console.print(escape(suite.badge), soft_wrap=True)
        if suite.left_out:
            whole = len(suite.findings) + suite.left_out
            said = f"LEFT OUT: {suite.left_out} of {whole} requirements of {suite.backend} ({suite.suite})"
            console.print(escape(said), soft_wrap=True)


def _shown(number: Number) -> str:
    return f"{number.name}: {number.value:.4g}{f' ({number.bound})' if number.bound else ''}"


def _lines(found: Finding) -> list[str]:
    """The last numbers of a requirement: after a failure these are the relevant ones."""
    if found.outcome is Outcome.NOT_CLAIMED:
        return [found.message.removeprefix(NOT_CLAIMED)]
    shown = [_shown(number) for number in found.numbers[-SHOWN:]]
    more = len(found.numbers) - len(shown)
    return [*shown, f"and {more} more"] if more > 0 else shown
