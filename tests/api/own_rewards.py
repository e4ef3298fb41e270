"""Rewards of a module beside a script."""

from __future__ import annotations

from rlsdk.interfaces import RewardSample


def length(sample: RewardSample) -> float:
    return float(len(sample.response))
