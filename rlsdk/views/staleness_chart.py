"""Age of the tokens of each step as an SVG: one bar per step, split by age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlsdk.views.charts import stacked_bars

MOST_BARS = 120
SHARE = "schedule/staleness_share_"
LONGEST_NUMBER = 8
"""Most digits of an age: metric names are untrusted."""


def staleness_bars(metrics: Sequence[Mapping[str, float]]) -> str:
    """Share of each step's tokens by age in trainer steps; empty if none could be stale."""
    names = {name.removeprefix(SHARE) for m in metrics for name in m if name.startswith(SHARE)}
    ages = sorted(int(name) for name in names if name.isdecimal() and len(name) <= LONGEST_NUMBER)
    stride = max(len(metrics) // MOST_BARS, 1)
    rows = [
        {f"{age} behind": 100 * m[f"{SHARE}{age}"] for age in ages if f"{SHARE}{age}" in m} for m in metrics[::stride]
    ]
    return stacked_bars("Age of tokens, trainer steps", rows, unit="%") if len(ages) > 1 else ""
