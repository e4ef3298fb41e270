"""A reward of your own, in a file: `--reward reward_length.py:short_and_correct`.

It runs in a process of its own with limits on time and memory. What it raises, or a value that is no finite number,
costs that sample only, and is counted and shown.
"""

from __future__ import annotations

from rlsdk.interfaces import RewardSample


def short_and_correct(sample: RewardSample, *, limit: int = 200) -> float:
    """1 for the reference answer at the end of the response, less up to a half for length beyond `limit` characters."""
    correct = sample.answer is not None and sample.response.rstrip().endswith(sample.answer.strip())
    excess = max(len(sample.response) - limit, 0) / limit
    return float(correct) - 0.5 * min(excess, 1.0)
