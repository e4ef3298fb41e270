"""Rewards and a callback for runs in these tests."""

from __future__ import annotations

from collections.abc import Mapping

from rlsdk.interfaces import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    return sum(letter.isdigit() for letter in sample.response) / max(len(sample.response), 1)


def right_steps(sample: RewardSample) -> float:
    """1 if all steps, which semicolons separate, are digits."""
    return float(all(step.isdigit() for step in sample.response.rstrip(";").split(";")))


def large(sample: RewardSample) -> float:
    """The number of digits, far from 0."""
    return 1e8 + sum(letter.isdigit() for letter in sample.response)


def number_of_digits(sample: RewardSample) -> float:
    return float(sum(letter.isdigit() for letter in sample.response))


def rounded(sample: RewardSample) -> float:
    """Three tenths, in two ways of adding up."""
    return 0.1 + 0.2 if even_letters(sample) else 0.3


def constant(sample: RewardSample) -> float:
    return 0.5


def always_fails(sample: RewardSample) -> float:
    raise ValueError("always")


def fails_on_some(sample: RewardSample) -> float:
    """Fails on responses whose letters add up to a number that ends in 0 or 1."""
    if sum(map(ord, sample.response)) % 10 < 2:
        raise ValueError("odd")
    return 1.0


def stop_at_three(step: int, metrics: Mapping[str, float]) -> None:
    if step == 3:
        raise ValueError("three")


def even_letters(sample: RewardSample) -> float:
    """1 for about half of all responses."""
    return float(sum(map(ord, sample.response)) % 2 == 0)


_graded = 0


def fails_after_two(sample: RewardSample) -> float:
    """Of those that this process grades."""
    global _graded
    _graded += 1
    if _graded > 2:
        raise ValueError("late")
    return 1.0
