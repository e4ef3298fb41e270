"""Which groups can teach a group estimator anything: the predicate of dynamic sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, valid_rows
from rlsdk.interfaces import Batch


@dataclass(frozen=True, kw_only=True)
class GroupSignal:
    """What is known of each group, in ascending order of `uid`."""

    uid: Tensor
    """`[groups]` int64."""
    num_valid: Tensor
    """`[groups]` int64: rows with a usable score."""
    has_signal: Tensor
    """`[groups]` bool."""

    @property
    def share(self) -> float:
        """Share of the groups that have signal; 0 where there is no group."""
        return float(self.has_signal.float().mean()) if len(self.uid) else 0.0


def has_signal(scores: Tensor, valid: Tensor | None = None, *, min_spread: float = 0.0) -> bool:
    """True where the scores of one group differ.

    DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2, dynamic sampling: prompts of which every response is right, or
    every one wrong, give an advantage of 0 and are sampled again. A row that is not valid has no score: it counts
    neither as wrong nor as different, and a group with fewer than two valid rows has no signal.

    Args:
        scores: `[rows]` of one group.
        valid: `[rows]` bool; None: all of them.
        min_spread: largest less smallest score must be more than this.
    """
    usable = scores if valid is None else scores[valid]
    return len(usable) > 1 and bool(usable.max() - usable.min() > min_spread)


def group_signal(batch: Batch, *, min_spread: float = 0.0) -> GroupSignal:
    """`has_signal` of every group of a batch.

    Args:
        batch: whole groups, with `scores`, `uid` and, where rewards can fail, `valid`; `token_scores` are added to the
            scores of their rows.
        min_spread: as in `has_signal`.
    """
    uid = torch.unique(batch["uid"])
    groups, valid, scores = Groups.of(batch), valid_rows(batch), batch["scores"].double()
    if "token_scores" in batch:
        scores = scores + batch.row_sum(batch["token_scores"].double())
    num_valid = groups.sum(valid.long())
    largest = groups.largest(torch.where(valid, scores, -torch.inf))
    smallest = groups.smallest(torch.where(valid, scores, torch.inf))
    differs = (num_valid > 1) & (largest - smallest > min_spread)
    return GroupSignal(uid=uid, num_valid=num_valid, has_signal=differs)
