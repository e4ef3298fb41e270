"""Finds the groups whose advantages are not all 0, for dynamic sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, valid_rows
from rlsdk.interfaces import Batch


@dataclass(frozen=True, kw_only=True)
class GroupSignal:
    """Whether each group has signal, in ascending order of `uid`."""

    uid: Tensor
    """`[groups]` int64."""
    num_valid: Tensor
    """`[groups]` int64: rows with a usable score."""
    has_signal: Tensor
    """`[groups]` bool."""

    @property
    def share(self) -> float:
        """Share of the groups that have signal; 0 if there is no group."""
        return float(self.has_signal.float().mean()) if len(self.uid) else 0.0


def has_signal(scores: Tensor, valid: Tensor | None = None, *, min_spread: float = 0.0) -> bool:
    """Whether the scores of one group differ.

    DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2, dynamic sampling: if all responses to a prompt are correct, or
    all are wrong, their advantages are 0, and other prompts are sampled instead. An invalid row has no score and is
    ignored; a group with fewer than two valid rows has no signal.

    Args:
        scores: `[rows]` of one group.
        valid: `[rows]` bool; None: all rows.
        min_spread: the maximum minus the minimum score must exceed this.
    """
    usable = scores if valid is None else scores[valid]
    return len(usable) > 1 and bool(usable.max() - usable.min() > min_spread)


def group_signal(batch: Batch, *, min_spread: float = 0.0) -> GroupSignal:
    """Computes `has_signal` for every group of a batch.

    Args:
        batch: whole groups, with `scores`, `uid` and, if rewards can fail, `valid`. `token_scores` are added to the
            scores of their rows.
        min_spread: see `has_signal`.
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
