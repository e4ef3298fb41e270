"""`rlsdk doctor`: checks this machine, its environment and its plugins, and prints a verdict."""

from __future__ import annotations

import json
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rlsdk.api.machine import findings as look
from rlsdk.diagnosis import Finding, Health, verdict
from rlsdk.system.printable import MESSAGE_CHARS, one_line, printable
from rlsdk.system.quantities import counted
from rlsdk.system.streams import stdout_aside

MARKS = {Health.OK: "[green]ok     [/]", Health.WARNING: "[yellow]warning[/]", Health.FAULT: "[bold red]FAULT  [/]"}
NAME_WIDTH = 20
EXIT_FAULTS = 1


def run(run_dir: Path, ray_address: str | None, *, as_json: bool) -> None:
    """Prints each finding immediately, then the verdict; exits with code 1 if there are faults."""
    findings = []
    with stdout_aside() if as_json else nullcontext():
        for finding in look(run_dir, ray_address):
            findings.append(finding)
            if not as_json:
                show(finding)
    if as_json:
        print(json.dumps({"verdict": verdict(findings), "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        conclude(findings)
    if verdict(findings) is Health.FAULT:
        sys.exit(EXIT_FAULTS)


def show(finding: Finding) -> None:
    """Prints a finding as one line."""
    from rich.markup import escape

    name = escape(f"{one_line(finding.check):<{NAME_WIDTH}}")
    _print(f"{MARKS[finding.state]}  {name} {escape(one_line(finding.found, MESSAGE_CHARS))}")


def conclude(findings: list[Finding]) -> None:
    """Prints the verdict, and how to fix each problem, worst first."""
    from rich.markup import escape

    bad = sorted((f for f in findings if f.state is not Health.OK), key=lambda f: f.state is not Health.FAULT)
    faults = sum(finding.state is Health.FAULT for finding in bad)
    said = {
        Health.OK: "[green]well[/]: nothing to fix",
        Health.WARNING: f"[yellow]usable[/]: {counted(len(bad), 'warning')}",
        Health.FAULT: f"[bold red]{counted(faults, 'fault')}[/] and {counted(len(bad) - faults, 'warning')}",
    }
    _print(f"\nverdict: {said[verdict(findings)]}")
    for finding in bad:
        if finding.fix:
            _print(f"\n{MARKS[finding.state].replace(' ', '')} {escape(one_line(finding.check))}")
            _print(escape(textwrap.indent(printable(finding.fix, MESSAGE_CHARS), "  ")))


def _print(text: str) -> None:
    from rlsdk.views.terminal import SafeConsole

    SafeConsole(file=sys.stdout, highlight=False, soft_wrap=True).print(text)
