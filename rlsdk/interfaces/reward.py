"""What a reward may return instead of a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RewardRecord:
    """The result of a reward for one sample, when a number is not enough.

    return RewardRecord(score=1.0, metrics={"tests_passed": 7})
    return RewardRecord(score=None)  # this reward does not apply to this sample
    """

    score: float | None
    """Score of the whole response; assigned to its last token. None: the reward does not apply to this sample and adds
    nothing to its score."""
    token_scores: Sequence[float] | NDArray[np.floating] | None = None
    """One finite number for each of `RewardSample.response_ids`, added to `score` token by token. Values on tokens that
    the policy did not sample (a tool's output) are ignored."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers by name (letters, digits, `_`, `-`, `.`), logged as the mean over a step's samples that have them:
    `reward/REWARD/METRIC`."""
