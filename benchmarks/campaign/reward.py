"""The campaign's reward: takes long enough that a fault can strike while it is at work."""

from __future__ import annotations

import time

from rlsdk.interfaces import RewardSample

SECONDS = 0.02


def share_of_digits(sample: RewardSample) -> float:
    """Share of the response's characters that are digits."""
    time.sleep(SECONDS)
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
