"""Metrics of updates and log-probs, as plain floats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlsdk.algorithms.kl import k3


def update_means(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns means over the mini-batches of a step, from the `sums` that objectives return.

    - Names that end in `_loss` are terms of the loss, which are already normalised: their mean over mini-batches. With
      every aggregation they add up to the mean of `ForwardBackwardResult.loss`.
    - Names that end in `_weight` are divisors, and are left out.
    - All others: the sum over all mini-batches divided by the sum of `metric_weight`; left out if that is 0 (no token
      was counted). Mini-batches that lack a name do not count for it.

    Args:
        sums: one mapping per optimizer step, summed over micro-batches and ranks.
    """
    names = sorted({name for each in sums for name in each if not name.endswith("_weight")})
    means: dict[str, float] = {}
    for name in names:
        having = [each for each in sums if name in each]
        total = math.fsum(each[name] for each in having)
        weight = float(len(having))
        if not name.endswith("_loss"):
            weight = math.fsum(each.get("metric_weight", 1.0) for each in having)
        if weight:
            means[name] = total / weight
    return means


@dataclass(frozen=True, kw_only=True)
class LogProbDifference:
    """Difference between two engines' log-probs of the same tokens, in nats; all 0 if there are no tokens."""

    mean_abs: float = 0.0
    p95_abs: float = 0.0
    """95th percentile of the absolute difference."""
    max_abs: float = 0.0
    kl: float = 0.0
    """k3 estimate of KL(rollout || train): the tokens were sampled by the rollout engine."""


def log_prob_difference(train: Tensor, rollout: Tensor, mask: Tensor) -> LogProbDifference:
    """Compares the train engine's log-probs with the rollout engine's, over response tokens.

    Two engines with the same weights differ only by rounding (1e-5 in float32, 1e-2 in bfloat16). A larger difference
    means that they have different weights, or compute different distributions.

    Args:
        train: `[N]` float32, recomputed.
        rollout: `[N]` float32, as returned at sampling.
        mask: `[N]` bool, True on response tokens.
    """
    train, rollout = train[mask].double(), rollout[mask].double()
    if not len(train):
        return LogProbDifference()
    difference = (train - rollout).abs()
    return LogProbDifference(
        mean_abs=float(difference.mean()),
        p95_abs=_quantile(difference, 0.95),
        max_abs=float(difference.max()),
        kl=float(k3(rollout, train).mean()),
    )


def _quantile(values: Tensor, share: float) -> float:
    """Returns the smallest value that is >= `share` of all values. `torch.quantile` refuses more than 2**24 values."""
    return float(values.kthvalue(max(1, math.ceil(share * len(values)))).values)
