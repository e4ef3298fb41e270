"""Plain data for grading: rewards and their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

OWN_METRICS = ("applied_share", "failed_share")
"""Metrics that a run logs for every reward besides its mean; a reward's own metrics may not have these names."""
Scalar: TypeAlias = "str | int | float | bool | None"


class FailureKind(StrEnum):
    """Why a sample has no reward."""

    EXCEPTION = "exception"
    """The function raised."""
    TIMEOUT = "timeout"
    """It took longer than `RewardLimits.timeout_s`, or the batch longer than `batch_timeout_s`."""
    MEMORY = "memory"
    """It needed more than `RewardLimits.memory_mb`."""
    NAN = "nan"
    """It returned NaN, an infinity, or a number larger than `RewardLimits.max_value`."""
    TYPE = "type"
    """It returned neither a number nor a record of numbers."""
    CRASH = "crash"
    """The grading process died while it graded the sample, or died too often (`max_losses_in_a_row`)."""
    SERVICE = "service"
    """The service did not answer, or returned something other than scores."""
    INAPPLICABLE = "inapplicable"
    """No reward of non-zero weight applies to the sample: because of its row, or because all returned None (as with a
    missing `return`)."""


@dataclass(frozen=True, kw_only=True)
class RewardDef:
    """One term of the reward."""

    name: str
    """Name in metrics; unique within a run."""
    target: str
    """`pkg.mod:fn` or `path/file.py:fn` of a `RewardFn` or `BatchRewardFn`."""
    weight: float = 1.0
    """Factor in a sample's score; 0: the reward is only logged, and its failures do not fail the sample."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: JSON types."""
    rows: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    """Field of the data row -> values for which this reward applies; all fields must match. Empty: every row."""
