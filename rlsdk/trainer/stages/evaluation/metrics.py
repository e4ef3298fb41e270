"""Metrics of an evaluation: pure arithmetic on the results of several samples per prompt.

Samples without a grade are left out beforehand; a prompt without graded samples counts in no metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One graded sample."""

    correct: bool
    answer: str | None
    """Key of the final answer: samples with equal keys agree. None: no final answer was found."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, drawn without replacement from the n given ones.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 ("Evaluating Large Language Models Trained on
    Code", arXiv:2107.03374, equation 1), in its stable form.

    Args:
        num_samples: n, at least `k`.
        num_correct: c, 0 to n.
        k: at least 1.
    """
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Probability that the majority answer of k samples is correct, drawn without replacement from the n given ones.

    Each sample votes for its answer; samples without an answer do not vote, and without any vote nothing is correct.
    Ties are broken at random. An answer counts as the share of its samples that are correct.

    Args:
        votes: n votes, at least `k`.
        k: at least 1; either n, or any value if n is at most `MAX_VOTES`.
    """
    counts = Counter(vote.answer for vote in votes if vote.answer is not None)
    correct = Counter(vote.answer for vote in votes if vote.answer is not None and vote.correct)
    share = 0.0
    for answer, num_correct in correct.items():
        others = counts.copy()
        own = others.pop(answer)
        share += _wins(own, tuple(sorted(others.values())), len(votes), k) * num_correct / own
    return share


def best_at_k(scored: Sequence[tuple[float, bool]], k: int) -> float:
    """Probability that the sample with the highest score of k samples is correct, drawn without replacement from the n
    given ones. Ties are broken at random.

    Args:
        scored: score of each of n samples, and whether it is correct; at least `k`.
        k: at least 1.
    """
    blocks: dict[float, list[bool]] = {}
    for score, correct in scored:
        blocks.setdefault(score, []).append(correct)
    below, share = 0, 0.0
    for _, block in sorted(blocks.items()):
        wins = math.comb(below + len(block), k) - math.comb(below, k)
        share += wins / math.comb(len(scored), k) * sum(block) / len(block)
        below += len(block)
    return share


@cache
def _wins(own: int, others: tuple[int, ...], num_samples: int, k: int) -> float:
    """Probability that an answer with `own` samples is the majority of k drawn samples; `others` are the sample counts
    of the other answers, and the remaining samples have no answer."""
    if k == num_samples:
        most = max(others, default=0)
        return 0.0 if own < most else 1.0 / (1 + others.count(own))
    silent = num_samples - own - sum(others)
    won = 0.0
    for mine in range(1, min(own, k) + 1):
        # ways[t, r]: number of ways to take r samples of other answers such that t of these answers tie with this one
        # and none has more votes
        ways = np.zeros((k // mine + 1, k - mine + 1))
        ways[0, 0] = 1.0
        for count in others:
            ways = _with_answer(ways, count, mine)
        ties = 1.0 / (1.0 + np.arange(len(ways)))
        rest = np.array([math.comb(silent, k - mine - taken) for taken in range(k - mine + 1)], np.float64)
        won += math.comb(own, mine) * float(ties @ ways @ rest)
    return won / math.comb(num_samples, k)


def _with_answer(ways: np.ndarray, count: int, mine: int) -> np.ndarray:
    """`ways` extended by another answer with `count` samples, of which at most `mine` are taken."""
    ways_with = ways.copy()
    width = ways.shape[1]
    for taken in range(1, min(count, mine, width - 1) + 1):
        part = math.comb(count, taken) * ways[:, : width - taken]
        if taken == mine:
            ways_with[1:, taken:] += part[:-1]
        else:
            ways_with[:, taken:] += part
    return ways_with


def clustered_error(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over grouped values: the samples of a prompt are correlated.

    sqrt(G / (G - 1) * sum over groups of (sum of their deviations from the mean) ** 2) / N: the clustered standard
    error of Miller 2024 ("Adding Error Bars to Evals", arXiv:2411.00640, section 2.2) with the correction for few
    groups. For groups of equal size it is the standard error of the mean of group means. None: fewer than two groups.
    """
    filled = [group for group in groups if group]
    if len(filled) < 2:
        return None
    count = sum(map(len, filled))
    mean = math.fsum(value for group in filled for value in group) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in filled)
    return math.sqrt(squares * len(filled) / (len(filled) - 1)) / count
