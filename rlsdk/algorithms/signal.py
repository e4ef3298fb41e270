"""The one notion of different scores: for dynamic sampling, advantages, metrics and thresholds.

Scores are float64 sums, so that 0.1 + 0.2 is not 0.3. Differences of the size of such rounding are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, Samples, total_scores
from rlsdk.interfaces import Batch

ROUNDING = 2.0**-44
"""Two scores are equal if they differ by at most this share of the larger one: 256 roundings of a float64."""
NEGLIGIBLE = 2.0**-50
"""Or by at most this, in units of reward: what rounding leaves of terms that cancel each other."""
LOST = 2.0**-8
"""Share of a difference that may be lost in float32."""
BEST = "best"
"""Value of an estimator's attribute `compares`: it gives an advantage to the only best sample of a group."""


@dataclass(frozen=True, kw_only=True)
class GroupSignal:
    """Whether each group has signal, in ascending order of `uid`."""

    uid: Tensor
    """`[groups]` int64."""
    num_valid: Tensor
    """`[groups]` int64: samples with a usable score."""
    has_signal: Tensor
    """`[groups]` bool."""

    @property
    def share(self) -> float:
        """Share of the groups that have signal; 0 if there is no group."""
        return float(self.has_signal.float().mean()) if len(self.uid) else 0.0


def tolerance(score: Tensor, other: Tensor) -> Tensor:
    """Largest difference that counts as none between scores of these sizes; float64."""
    return ROUNDING * torch.maximum(score.abs(), other.abs()).double() + NEGLIGIBLE


def scores_differ(larger: Tensor, smaller: Tensor, *, min_spread: float = 0.0) -> Tensor:
    """Returns bool: whether `larger` exceeds `smaller` by more than `min_spread`, beyond what rounding does to float64.

    False for the extremes of no score, -inf and inf.
    """
    return larger.double() - smaller.double() - min_spread > tolerance(larger, smaller)


def reaches(score: float, threshold: float) -> bool:
    """Whether a score is at least `threshold`, up to what rounding does to float64."""
    return score >= threshold - (ROUNDING * max(abs(score), abs(threshold)) + NEGLIGIBLE)


def is_verdict(values: Iterable[float], threshold: float) -> bool:
    """Whether values say what is right: no two that reach `threshold` differ. Otherwise they are a scale, such as the
    length of a response, and that one reaches the threshold means nothing."""
    high = [value for value in values if reaches(value, threshold)]
    return not high or reaches(min(high), max(high))


def has_signal(
    scores: Tensor, valid: Tensor | None = None, *, min_spread: float = 0.0, compares: str | None = None
) -> bool:
    """Whether the scores of one group differ.

    DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2, dynamic sampling: if all responses to a prompt are correct, or
    all are wrong, their advantages are 0, and other prompts are sampled instead. An invalid sample has no score and is
    ignored; a group with fewer than two valid samples has no signal.

    Args:
        scores: `[samples]` of one group.
        valid: `[samples]` bool; None: all samples.
        min_spread: the maximum minus the minimum score must exceed this.
        compares: see `group_signal`.
    """
    usable = scores if valid is None else scores[valid]
    if len(usable) < 2:
        return False
    other = usable.topk(2).values[1] if compares == BEST else usable.min()
    return bool(scores_differ(usable.max(), other, min_spread=min_spread))


def group_signal(batch: Batch, *, min_spread: float = 0.0, compares: str | None = None) -> GroupSignal:
    """Computes `has_signal` for every group of a batch.

    Args:
        batch: whole groups, with `scores`, `uid` and, if rewards can fail, `valid`. `token_scores` are added to the
            scores of their samples. With `chain_scores`, a group has signal if those of one of its chains differ.
        min_spread: see `has_signal`.
        compares: the attribute of that name of the advantage estimator: None: all scores of a group; `best`: the best
            one with the second best.
    """
    whole, samples = Samples.of(batch), Samples.scored(batch)
    groups, valid, scores = samples.groups, samples.valid, total_scores(samples)
    competing = torch.where(valid, scores, -torch.inf)
    largest = groups.largest(competing)
    if compares == BEST:
        is_best = competing == largest[groups.index]
        several = groups.sum(is_best.long()) > 1
        other = torch.where(several, largest, groups.largest(torch.where(is_best, -torch.inf, competing)))
    else:
        other = groups.smallest(torch.where(valid, scores, torch.inf))
    differs = (groups.sum(valid.long()) > 1) & scores_differ(largest, other, min_spread=min_spread)
    has_signal = Groups.by(samples.of_rows(batch["uid"])).sum(differs[groups.index].long()) > 0
    num_valid = whole.groups.sum(whole.valid.long())
    return GroupSignal(uid=torch.unique(batch["uid"]), num_valid=num_valid, has_signal=has_signal)


def score_dtype(batch: Batch) -> torch.dtype:
    """The dtype in which a step's rewards are added up: float32 if it keeps the differences of scores, else float64.

    It keeps them if, in every group and over the whole step, no difference between neighbouring scores changes by more
    than `LOST` of itself, and equal scores stay equal. Scores of ordinary size give the same numbers in every version
    of rlsdk; 1e8 and 1e8 + 1 stay apart.

    Args:
        batch: with `scores`, and, where they are in use, `chain_scores`, `uid`, `valid`, `token_scores`,
            `baseline_scores`.
    """
    samples = Samples.scored(batch)
    valid = samples.valid
    exact, rounded = total_scores(samples)[valid], total_scores(samples, torch.float32)[valid]
    index = samples.groups.index[valid] if "uid" in batch else torch.zeros(len(exact), dtype=torch.int64)
    if "baseline_scores" in batch:
        baseline = samples.of_rows(batch["baseline_scores"])[valid].double()
        known = baseline.isfinite()
        exact, index = torch.cat([exact, baseline[known]]), torch.cat([index, index[known]])
        rounded = torch.cat([rounded, baseline[known].float().double()])
    if torch.equal(exact, rounded):
        return torch.float32
    order = exact.argsort()
    ends = order[[0, -1]]
    order = order[index[order].argsort(stable=True)]
    together = index[order][1:] == index[order][:-1]
    steps = [torch.stack([order[:-1], order[1:]])[:, together], ends[:, None]]
    below, above = torch.cat(steps, dim=1)
    gap, kept = exact[above] - exact[below], rounded[above] - rounded[below]
    allowed = torch.where(scores_differ(exact[above], exact[below]), LOST * gap, tolerance(exact[above], exact[below]))
    return torch.float32 if bool(((kept - gap).abs() <= allowed).all()) else torch.float64
