"""One thing that was looked at, and what many of them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Works, but slower, less tested, or not for long."""
    FAULT = "fault"
    """Runs that need it will fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    state: Health
    found: str
    """What is the case, in one line."""
    fix: str = ""
    """The command that fixes it; empty where nothing has to be done."""


def verdict(findings: Sequence[Finding]) -> Health:
    """The worst state of all."""
    order = list(Health)
    return max((finding.state for finding in findings), key=order.index, default=Health.OK)
