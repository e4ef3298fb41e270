"""`rlsdk doctor`: checks this machine, its environment and its plugins, and prints a verdict."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.api.machine import findings as look
from rlsdk.diagnosis import Finding, Health, verdict
from rlsdk.system.printable import MESSAGE_CHARS, one_line, printable
from rlsdk.system.quantities import counted
from rlsdk.system.streams import stdout_aside

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {Health.OK: "[green]ok     [/]", Health.WARNING: "[yellow]warning[/]", Health.FAULT: "[bold red]FAULT  [/]"}
NAME_WIDTH = 20
EXIT_FAULTS = 1


def run(run_dir: Path, ray_address: str | None, *, as_json: bool) -> None:
    """Prints each finding immediately, then the verdict; exits with code 1 if there are faults.

    On a terminal, the last line names the check that is being waited for.
    """
    findings: list[Finding] = []
    if as_json:
        with stdout_aside():
            findings += look(run_dir, ray_address)
    else:
        with _terminal().status("") as waiting:
            for finding in look(run_dir, ray_address, lambda check: waiting.update(f"checking {check} ...")):
                findings.append(finding)
                show(finding, waiting.console)
    if as_json:
        print(json.dumps({"verdict": verdict(findings), "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        conclude(findings)
    if verdict(findings) is Health.FAULT:
        sys.exit(EXIT_FAULTS)


def show(finding: Finding, console: Console) -> None:
    """Prints a finding as one line."""
    from rich.markup import escape

    name = escape(f"{one_line(finding.check):<{NAME_WIDTH}}")
    console.print(f"{MARKS[finding.state]}  {name} {escape(one_line(finding.found, MESSAGE_CHARS))}")


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
    _terminal().print(text)


def _terminal() -> Console:
    from rlsdk.views.terminal import SafeConsole

    return SafeConsole(file=sys.stdout, highlight=False, soft_wrap=True)
