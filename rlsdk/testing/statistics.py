"""Chi-square test of samples against a distribution, with a fixed probability of a false alarm."""

from __future__ import annotations

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""A right engine fails a statistical requirement once in so many runs with other seeds. Seeds are fixed, so an engine
with `Capability.SEED` that passed once passes always."""
LEAST_EXPECTED = 5.0
"""Tokens of fewer expected samples share a bin: the chi-square distribution is no approximation for them."""


def chi_square_p(counts: Tensor, probabilities: Tensor, least: float = LEAST_EXPECTED) -> float:
    """Chance of counts at least as far off, if samples follow `probabilities` (Pearson's chi-square test).

    Args:
        counts: `[V]` how often each token came.
        probabilities: `[V]` float64, summing to 1.
        least: expected samples of its own bin.

    Returns:
        The p-value; 0 where a token came that has no probability at all.
    """
    counts, expected = counts.double(), probabilities.double() * float(counts.sum())
    if bool(((expected == 0) & (counts > 0)).any()):
        return 0.0
    many = expected >= least
    seen, wanted = counts[many], expected[many]
    rest = float(expected[~many].sum())
    if rest >= least:
        seen = torch.cat([seen, counts[~many].sum()[None]])
        wanted = torch.cat([wanted, torch.tensor([rest], dtype=torch.float64)])
    freedom = len(seen) - 1
    if freedom < 1:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
