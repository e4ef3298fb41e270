"""The result of a check, and the verdict over many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slower, untested, or not for long."""
    FAULT = "fault"
    """Runs that need it will fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    state: Health
    found: str
    """The result, in one line."""
    fix: str = ""
    """The command that fixes it; empty if nothing must be done."""


def verdict(findings: Sequence[Finding]) -> Health:
    """The worst severity."""
    order = list(Health)
    return max((finding.state for finding in findings), key=order.index, default=Health.OK)
