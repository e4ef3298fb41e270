"""Selects the next source of a mixture, with exact proportions at every step, not only on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlsdk.interfaces import ConfigError


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One source of a mixed data set: a contiguous range of its prompts."""

    name: str
    """Name of the source, as the user gave it."""
    size: int
    """Number of prompts."""
    weight: Fraction
    """Share of the prompts that are drawn, relative to the other parts."""


def exact_weight(weight: float, name: str) -> Fraction:
    """The weight as typed: 0.1 is exactly a tenth, not the nearest binary number.

    Raises:
        ConfigError: not above zero, or not finite.
    """
    if not 0 < weight < float("inf"):
        raise ConfigError(f"weight of data source {name!r} is {weight}; expected a finite number above 0")
    return Fraction(repr(weight))


def next_part(weights: Sequence[Fraction], taken: Sequence[int]) -> int:
    """Index of the part from which the next prompt is drawn.

    Tijdeman's algorithm ("The chairman assignment problem", 1980): after every draw, the number of draws from each of
    k parts differs from its exact share by at most 1 - 1/(2k - 2), which is less than one prompt.

    Args:
        weights: of the parts, above zero.
        taken: number of prompts drawn from each so far by this function.
    """
    count = len(weights)
    if count == 1:
        return 0
    total, draw = sum(weights), sum(taken) + 1
    slack = Fraction(1, 2 * count - 2)
    behind = [weight * draw / total - done for weight, done in zip(weights, taken, strict=True)]
    due = [part for part in range(count) if behind[part] >= slack]
    return min(due, key=lambda part: ((1 - slack - behind[part]) / weights[part], part))
