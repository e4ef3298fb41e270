"""`rlsdk environments check`: the requirements of an environment, without a model and without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import typer

from rlsdk.agents.conformance.lab import Lab
from rlsdk.agents.conformance.requirement import Finding, Verdict
from rlsdk.agents.conformance.suite import REQUIREMENTS, check
from rlsdk.agents.environments.naming import find_environment
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.data import load_rows
from rlsdk.interfaces import ConfigError
from rlsdk.registry import ComponentKind, Registry
from rlsdk.system.printable import printable

EXIT_FAILED = 1
_MARKS = {Verdict.HELD: "ok", Verdict.FAILED: "FAILED", Verdict.WARNED: "warning", Verdict.LEFT_OUT: "left out"}


def run(
    target: str, *, data: str | None, num_rows: int, options: Sequence[str], only: Sequence[int], seed: int
) -> None:
    """Prints a line for each requirement; ends with exit code 1 if one does not hold.

    Raises:
        ConfigError: there is no such class, it is no environment, or an option or number cannot be used.
        DataError: the rows cannot be read.
    """
    numbers = {one.number for one in REQUIREMENTS}
    if odd := sorted({*only} - numbers):
        raise ConfigError(f"--only {odd[0]}: expected numbers of requirements, 1 to {max(numbers)}")
    made = find_environment(target)
    environment = EnvironmentClass.of(made, target)
    given = _options(options)
    try:
        inspect.signature(made).bind(**given)
    except TypeError as error:
        raise ConfigError(f"--option: {target!r} is not made with {sorted(given)}: {error}") from error
    rows = [{}] if data is None else _rows(data, num_rows)
    findings = check(Lab(environment=environment, rows=rows, options=given, seed=seed), only)
    for finding in findings:
        print(printable(line(finding)))
    names = ", ".join(tool["function"]["name"] for tool in environment.tools) or "none"
    print(printable(f"{target}: tools {names}; {_counts(findings)}, on {len(rows)} rows"))
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def line(finding: Finding) -> str:
    """One line on a requirement."""
    said = f": {finding.text}" if finding.text else ""
    return f"{finding.requirement.number:3} {_MARKS[finding.verdict]:8} {finding.requirement.name}{said}"


def _counts(findings: Collection[Finding]) -> str:
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)


def _rows(data: str, count: int) -> list[Mapping[str, Any]]:
    registry = Registry.discover()
    rows = load_rows(
        data,
        kinds=registry.usable(ComponentKind.DATASET),
        resolve=lambda kind: registry.component(ComponentKind.DATASET, kind),
        limit=count,
    )
    if not rows:
        raise ConfigError(f"--data {data!r} has no row; an environment is checked on at least one")
    return [row.row for row in rows]


def _options(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, with the value as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--option {one!r}: expected NAME=VALUE, such as --option size=4")
        try:
            found[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {one!r}: {text!r} is no YAML value") from error
    return found
