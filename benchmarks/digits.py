"""A reward that random samples differ in."""

from __future__ import annotations

from rlsdk.interfaces import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    return sum(letter.isdigit() for letter in sample.response) / max(len(sample.response), 1)
