"""Protocols of what a user or a light plugin passes in: functions and small objects, not engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """What a reward sees of one response."""

    prompt: str
    """Text of the prompt as the model saw it, chat template included."""
    response: str
    """Decoded response without the token that ended it; other special tokens stay visible."""
    answer: str | None
    """The reference answer of the data row, when it has one."""
    row: Mapping[str, Any]
    """The whole data row, `metadata` included: JSON types only."""
    truncated: bool
    """The response hit its token limit."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the rollouter handed over (`Trajectory.extra`): JSON types only."""


class RewardFn(Protocol):
    """A finite number for one sample. Runs in a killable process: it may raise or hang, at the cost of that sample.

    An attribute `prepare` on the function, itself a function without arguments, is called once before the first
    sample, outside the sample's time limit: the place for slow imports.
    """

    def __call__(self, sample: RewardSample) -> float: ...


class BatchRewardFn(Protocol):
    """As `RewardFn`, for several samples at once; marked by an attribute `batched = True` on the function."""

    batched: bool

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]: ...


class AdvantageEstimator(Protocol):
    """Adds `advantages` (and `returns` where it has them) to a whole step's batch."""

    def __call__(self, batch: Batch, **options: Any) -> Batch:
        """`batch` has `token_level_rewards`, `response_mask`, `scores`, `uid`, `valid` (and `values`, if asked)."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """What a policy loss sees of a micro-batch: all flat `[N]` float32, whole rows, first positions masked."""

    log_probs: Tensor
    """With gradient."""
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    """Bool, True on response tokens."""
    batch: Batch
    """For `row_sum`, `row_of_token` and further fields."""


class PolicyLoss(Protocol):
    """Loss and metrics of each token, `[N]` each; the caller weighs both with `loss_weight` and adds them up.

    A function that says `function.zero_without_advantage = True` promises that tokens of advantage 0 have no gradient:
    rows of such tokens only are then left out of updates.
    """

    def __call__(self, inputs: PolicyLossInputs, **options: Any) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class Tracker(Protocol):
    """Receives the run's numbers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrackerContext:
    """What a tracker is built from: `Tracker(context)`."""

    run_dir: str
    run_name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None
    """Step of the checkpoint that the run goes on from: what was logged past it will come again. None: nothing was
    logged that this run repeats."""


class StepCallback(Protocol):
    """Called after each step with its number and metrics; what it raises ends the run after a save."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None: ...
