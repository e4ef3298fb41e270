"""A requirement: a named test of a suite, and the numbers that it measures. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from rlsdk.interfaces import Capability

MARK = "rlsdk_requirement"
NUMBERS = "rlsdk_numbers"
"""Key of the numbers in a test's user properties."""
NOT_CLAIMED = "not claimed: "
"""Prefix of a skip reason if a capability is not claimed."""

Function = TypeVar("Function", bound=Callable[..., Any])


def requirement(
    name: str, *, needs: Capability | None = None, since: tuple[int, int] | None = None, basic: bool = False
) -> Callable[[Function], Function]:
    """Makes a test of a suite a requirement.

    Args:
        name: its name in reports; unique in its suite, and stable, because it is the key of tables.
        needs: the requirement applies only to backends that claim this capability.
        since: interface version that added it; reports call it new while this version is the newest.
        basic: one of the few that also run where an engine's whole suite would take too long
            (`rlsdk plugins check --basic`).
    """

    def mark(function: Function) -> Function:
        if not function.__doc__:
            raise ValueError(f"requirement {name!r} needs a docstring: it is what a report says when it fails")
        return pytest.mark.rlsdk_requirement(name, needs, since=since, basic=basic)(function)  # type: ignore[no-any-return]

    return mark


def unmeasured(capability: Capability) -> Callable[..., None]:
    """Placeholder for a capability without a requirement: a backend that claims it gets "not run", never "passed"."""

    def not_run(self: object) -> None:
        pytest.skip(
            f"{capability.value} is claimed, and no requirement measures it: nothing here shows that it works. To have "
            f"it measured, override `test_{capability.value}` in the suite's class with a requirement of your own"
        )

    not_run.__doc__ = f"`{capability.value}` is what the interface says of it: not measured by this kit."
    return requirement(f"unmeasured.{capability.value}", needs=capability, basic=True)(not_run)


def required(suite: type) -> frozenset[Capability]:
    """Capabilities of a suite's requirements, including those of tests that a subclass omits."""
    functions = (function for part in suite.__mro__ for function in vars(part).values())
    marks = (mark for function in functions for mark in getattr(function, "pytestmark", ()))
    return frozenset(mark.args[1] for mark in marks if mark.name == MARK and mark.args[1] is not None)


@dataclass(frozen=True)
class Number:
    """One measured number."""

    name: str
    value: float
    bound: str = ""
    """`<= 0.0001` or `== 3`; empty: no bound."""


class Measured:
    """Records the numbers of a requirement, and fails it if one is out of bounds."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self.numbers: list[Number] = []
        properties.append((NUMBERS, self.numbers))

    def record(self, name: str, value: float) -> None:
        """Records a number without a bound."""
        self.numbers.append(Number(name, float(value)))

    def at_most(self, name: str, value: float, limit: float) -> None:
        self._bounded(name, value, f"<= {limit:.6g}", fits=value <= limit)

    def at_least(self, name: str, value: float, limit: float) -> None:
        self._bounded(name, value, f">= {limit:.6g}", fits=value >= limit)

    def equal(self, name: str, value: float, expected: float) -> None:
        self._bounded(name, value, f"== {expected:.6g}", fits=value == expected)

    def none(self, name: str, faults: list[Any]) -> None:
        """Fails if there are any `faults`; the message shows the first few."""
        self.numbers.append(Number(name, len(faults), "== 0"))
        if faults:
            shown = "; ".join(map(str, faults[:3]))
            raise AssertionError(f"{name}: {len(faults)}, expected none: {shown}")

    def _bounded(self, name: str, value: float, bound: str, *, fits: bool) -> None:
        self.numbers.append(Number(name, float(value), bound))
        # NaN satisfies no bound.
        if not fits:
            raise AssertionError(f"{name}: {float(value):.6g}, expected {bound}")
