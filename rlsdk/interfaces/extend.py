"""Protocols of what a user or a light plugin passes in: functions and small objects, not engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlsdk.interfaces.batch import Batch
from rlsdk.interfaces.reward import RewardRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a function asks for beyond what every function of its kind gets."""

    fields: tuple[str, ...] = ()
    """Fields of the batch. One that the batch does not have is left out: a function that cannot do without it
    raises."""
    outputs: tuple[str, ...] = ()
    """Outputs of the model (`OUTPUTS`), with gradient: `entropy` for a policy loss."""


def reads(*fields: str, outputs: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Declares what a loss, an estimator or a KL penalty reads: the trainer sends those fields and no others.

        @reads("uid", "truncated", outputs=("entropy",))
        def my_loss(inputs: PolicyLossInputs) -> tuple[Tensor, Mapping[str, Tensor]]: ...

    The declaration is the attribute `reads` of the function; an object with `__call__` may have one of its own.
    """

    def declare(function: Function) -> Function:
        function.reads = Reads(fields=fields, outputs=tuple(outputs))  # type: ignore[attr-defined]
        return function

    return declare


def reads_of(function: object) -> Reads:
    """What `function` declared; nothing where it did not."""
    found = getattr(function, "reads", None)
    return found if isinstance(found, Reads) else Reads()


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
    response_ids: Sequence[int] | NDArray[np.int64] = field(default=(), compare=False, repr=False)
    """Every token behind the prompt, those of tools and the stop token included. Sent to functions with an attribute
    `reads_tokens = True` only; empty for all others."""


class RewardFn(Protocol):
    """A finite number for one sample, a `RewardRecord`, or None: the reward does not apply to it.

    Runs in a killable process: it may raise or hang, at the cost of that sample. Attributes that a function may have:
        prepare: a function without arguments, called once before the first sample, outside the sample's time limit:
            the place for slow imports.
        reads_tokens: True asks for `RewardSample.response_ids`.
        checks_rows: True says that a call with an empty response is quick, and raises ValueError for a row that cannot
            be graded whatever the response is. Of registered rewards, rows are checked so before a run starts.
    """

    def __call__(self, sample: RewardSample) -> float | RewardRecord | None: ...


class BatchRewardFn(Protocol):
    """As `RewardFn`, for several samples at once; marked by an attribute `batched = True` on the function."""

    batched: bool

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float | RewardRecord | None]: ...


class AdvantageEstimator(Protocol):
    """Adds `advantages` (and `returns` where it has them) to a whole step's batch.

    Fields that must be prepared for it (`values` of a critic, `baseline_scores` of greedy responses) are declared with
    `@reads`.
    """

    def __call__(self, batch: Batch, **options: Any) -> Batch:
        """`batch` has `token_level_rewards`, `response_mask`, `scores`, `uid`, `valid`, and what was declared."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """What a policy loss sees of a micro-batch: all flat `[N]` float32, whole rows, first positions masked.

    Off the mask all of these tensors are 0, whatever the batch holds there.
    """

    log_probs: Tensor
    """With gradient."""
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    """Bool, True on response tokens."""
    batch: Batch
    """For `row_sum`, `row_of_token`, and the fields declared with `@reads`."""
    entropy: Tensor | None = None
    """With gradient, in nats; given to a loss that declared `outputs=("entropy",)`."""


class PolicyLoss(Protocol):
    """Loss and metrics of each token, `[N]` each; the caller weighs both and adds them up.

    Attributes that a function may have:
        reads: see `reads`. Besides what it declares, a loss gets `log_probs`, `old_log_probs`, `advantages`.
        zero_without_advantage: True promises that tokens of advantage 0 have no gradient: rows of such tokens only are
            then left out of updates, and its metrics are means over the other rows.
        whole_groups: True asks that rows of equal `uid` stay together in mini- and micro-batches.
        on_policy_only: True says that the gradient has no ratio to `old_log_probs`: it is right for the first update
            of a step alone, and a run that makes several is warned.
    """

    def __call__(self, inputs: PolicyLossInputs, **options: Any) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class LossAggregation(Protocol):
    """How the tokens of a mini-batch share its loss."""

    def __call__(self, batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
        """The share of each token, `[N]`, of any float dtype; what stands off `counted` is ignored.

        Args:
            batch: one whole mini-batch: what one optimizer step sees, over all ranks.
            counted: `[N]` bool: response tokens of rows that carry loss.
            max_tokens: most response tokens that a row may have; None where nobody knows.
        """
        ...


class KlEstimator(Protocol):
    """KL(policy || reference) at each token, `[N]`, from the log-probs of the sampled tokens, `[N]` each.

    An attribute `not_as_loss`, a text, says why the estimator must not be differentiated; it can then stand in the
    reward only.
    """

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor: ...


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
