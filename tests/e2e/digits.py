"""A reward that a random model can climb."""

from __future__ import annotations

from rlsdk.interfaces import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    """Share of the response's characters that are digits."""
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
