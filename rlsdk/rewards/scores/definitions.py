"""Plain data for grading: rewards and their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from rlsdk.interfaces import ConfigError

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


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """Limits of grading. A sample that exceeds one has no reward; the run continues."""

    timeout_s: float = 10.0
    """Seconds per sample and reward."""
    memory_mb: int = 1024
    """MiB of address space that grading may use in addition to the loaded functions."""
    start_timeout_s: float = 120.0
    """Seconds to start a grading process: imports of reward modules and their `prepare`."""
    batched_timeout_s: float = 60.0
    """Seconds for one call of a batched function. After that, its samples are graded one by one."""
    batch_timeout_s: float = 600.0
    """Seconds for all samples of one `score` call; samples not graded by then count as timed out."""
    max_batch_samples: int | None = None
    """Maximum number of samples in one call of a batched function; None: all samples of a submission."""
    max_losses_in_a_row: int = 5
    """Grading processes lost in a row without grading a sample; after that the remaining samples count as crashed."""
    max_attempts: int = 3
    """Attempts at a sample whose grading process is killed from outside, and at loading the functions."""
    max_value: float = 1e30
    """Maximum magnitude of a score, a token score or a metric."""
    max_record_bytes: int = 1 << 21
    """Maximum bytes that a reward may return for one sample: 8 per token score, plus the metrics."""
    max_metrics: int = 32
    """Maximum number of metrics that a reward may return for one sample."""
    log_mb: float = 4.0
    """Maximum MiB of the log of reward functions; further output is discarded, with a note in the log."""

    allow_network: bool = False
    """Whether rewards may open sockets, to call a server."""
    allow_writes: bool = False
    """Whether rewards may write files outside their temporary folder."""
    isolation: Literal["auto", "always", "never"] = "auto"
    """Whether every call runs in its own forked process, which costs milliseconds and keeps no state between calls.
    auto: only for functions that run text as Python (`eval`, sympy's `parse_expr`), as far as their code shows."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that grading processes get besides the default ones (`allowed_environment`)."""

    def for_process(self) -> dict[str, Any]:
        """The fields that a grading process needs; `RewardLimits(**...)` reads them back."""
        names = ("memory_mb", "allow_network", "allow_writes", "isolation", "max_value", "max_record_bytes",
                 "max_metrics", "log_mb")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "isolation" and value not in ("auto", "always", "never"):
                raise ConfigError(f"reward limit isolation is {value!r}; expected auto, always or never")
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"reward limit {name} is {value!r}; expected a number above 0")
