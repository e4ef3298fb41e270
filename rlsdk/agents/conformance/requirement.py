"""What a requirement is, and what was found of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum

from rlsdk.agents.conformance.lab import Lab


class Verdict(StrEnum):
    """What became of a requirement."""

    HELD = "held"
    FAILED = "failed"
    WARNED = "warned"
    """Not held, and it need not be an error."""
    LEFT_OUT = "left out"
    """Nothing to check it with."""


class LeftOut(Exception):  # noqa: N818 -- it is no error
    """There is nothing to check a requirement with; says what is missing."""


Check = Callable[[Lab], AsyncIterator[str]]
"""Yields what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One thing that an environment must do."""

    number: int
    name: str
    check: Check
    warns: bool = False
    """Whether it warns where it does not hold."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of one requirement."""

    requirement: Requirement
    verdict: Verdict
    text: str = ""
    """What is wrong, or missing."""


async def find(requirement: Requirement, lab: Lab) -> Finding:
    """Checks one requirement; the first thing that is wrong decides."""
    try:
        async for problem in requirement.check(lab):
            verdict = Verdict.WARNED if requirement.warns else Verdict.FAILED
            return Finding(requirement=requirement, verdict=verdict, text=problem)
    except LeftOut as missing:
        return Finding(requirement=requirement, verdict=Verdict.LEFT_OUT, text=str(missing))
    except TimeoutError:
        return Finding(
            requirement=requirement, verdict=Verdict.FAILED, text=f"a call did not return within {lab.call_s:g} s"
        )
    except Exception as error:  # of a stranger's class
        return Finding(requirement=requirement, verdict=Verdict.FAILED, text=f"{type(error).__name__}: {error}")
    return Finding(requirement=requirement, verdict=Verdict.HELD)
