"""A reward that waits, as one does that asks a judge."""

from __future__ import annotations

import time

from rlsdk.interfaces import RewardSample


def vowels(sample: RewardSample, *, delay_s: float = 0.0) -> float:
    """Share of the response's letters that are vowels, after so many seconds."""
    time.sleep(delay_s)
    return sum(letter in "aeiou" for letter in sample.response) / max(len(sample.response), 1)
