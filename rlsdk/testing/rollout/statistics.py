"""Chi-square test of samples against a distribution, with a fixed probability of a false alarm."""

from __future__ import annotations

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""Probability that a correct engine fails a statistical requirement, over seeds. Seeds are fixed, so an engine with
`Capability.SEED` that passed once always passes."""
LEAST_EXPECTED = 5.0
"""Tokens with fewer expected samples share a bin, because the chi-square approximation does not hold for them."""


def chi_square_p(counts: Tensor, probabilities: Tensor, least: float = LEAST_EXPECTED) -> float:
    """Probability of a deviation at least this large if samples follow `probabilities` (Pearson's chi-square test).

    Args:
        counts: `[V]`: how often each token was drawn.
        probabilities: `[V]` float64, summing to 1.
        least: smallest expected number of samples of a bin.

    Returns:
        The p-value; 0 if a token of probability 0 was drawn.
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
