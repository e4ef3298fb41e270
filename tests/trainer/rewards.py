"""Rewards and a callback for runs in these tests."""

from __future__ import annotations

from collections.abc import Mapping

from rlsdk.interfaces import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    return sum(letter.isdigit() for letter in sample.response) / max(len(sample.response), 1)


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
