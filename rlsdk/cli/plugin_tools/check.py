"""`rlsdk plugins check`: the conformance suite of a backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rlsdk.interfaces import BackendKind, ConfigError, RlsdkError


def run(
    name: str,
    *,
    kind: str | None,
    options: Sequence[str],
    settings: Sequence[str],
    only: str,
    basic: bool,
    report: Path | None,
    verbose: bool,
    processes: int | None,
) -> None:
    """Prints the table of each suite; exits with 1 if the backend lacks something that it claims."""
    from rlsdk.testing.suites.kinds import kinds_of

    kinds_of(name, _kind(kind))
    if find_spec("pytest") is None:
        raise RlsdkError(
            "the conformance suites run with pytest, which is not installed here; run `pip install 'rlsdk[check]'`"
        )
    from rlsdk.testing.check import check_backend
    from rlsdk.testing.suites.report import print_report, to_json

    given = _pairs("--set", "tp_size=2", settings)
    if options:
        given["options"] = _pairs("--option", "enforce_eager=true", options)
    suites = check_backend(
        name, kind=_kind(kind), settings=given, only=only, basic=basic, verbose=verbose, processes=processes
    )
    if report is not None:
        report.write_text(to_json(suites), encoding="utf-8")
    print_report(suites)
    if not all(suite.passed for suite in suites):
        sys.exit(1)


def _kind(kind: str | None) -> BackendKind | None:
    if kind is not None and kind not in set(BackendKind):
        raise ConfigError(f"--kind {kind!r}: expected one of {[known.value for known in BackendKind]}")
    return BackendKind(kind) if kind is not None else None


def _pairs(flag: str, example: str, pairs: Sequence[str]) -> dict[str, object]:
    import yaml

    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{flag} {pair!r}: expected NAME=VALUE, as in {flag} {example}")
        found[name] = yaml.safe_load(value)
    return found
