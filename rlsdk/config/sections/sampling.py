"""Ranges of sampling settings, the same for training, evaluations and judges."""

from __future__ import annotations

from collections.abc import Iterator

from rlsdk.config.problem import Problem
from rlsdk.interfaces.generation import TEMPERATURES


def temperature_problems(temperature: float, *, can_be_greedy: bool) -> Iterator[Problem]:
    """Problem of a temperature by which no logits can be divided."""
    lowest, highest = TEMPERATURES
    if lowest <= temperature <= highest or (can_be_greedy and temperature == 0):
        return
    zero = "0 (greedy), or " if can_be_greedy else ""
    nearest = lowest if temperature < lowest else highest
    yield Problem(
        "temperature",
        value=temperature,
        expected=f"{zero}{lowest:g} to {highest:g}, because logits are divided by it in float32; the "
        f"nearest is {nearest:g}, and 0.01 already takes the most probable token nearly always",
    )
