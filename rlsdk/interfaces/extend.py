"""Protocols for what a user or a light plugin passes in: functions and small objects, not engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """What a function reads beyond what every function of its kind gets."""

    fields: tuple[str, ...] = ()
    """Fields of the batch. A field that the batch does not have is left out; a function that needs it raises."""
    outputs: tuple[str, ...] = ()
    """Outputs of the model (`OUTPUTS`), with gradient: `entropy` for a policy loss."""


def reads(*fields: str, outputs: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Declares what a loss, an estimator or a KL penalty reads: the trainer sends those fields and no others.

        @reads("uid", "truncated", outputs=("entropy",))
        def my_loss(inputs: PolicyLossInputs) -> tuple[Tensor, Mapping[str, Tensor]]: ...

    The declaration is stored as the attribute `reads` of the function; a callable object may define `reads` itself.
    """

    def declare(function: Function) -> Function:
        function.reads = Reads(fields=fields, outputs=tuple(outputs))  # type: ignore[attr-defined]
        return function

    return declare


def reads_of(function: object) -> Reads:
    """What `function` declared with `reads`; empty if it declared nothing."""
    found = getattr(function, "reads", None)
    return found if isinstance(found, Reads) else Reads()


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """What a reward receives for one response."""

    prompt: str
    """Text of the prompt as the model saw it, chat template included."""
    response: str
    """Decoded response without its end token; other special tokens are kept. Of an episode of several rows, that of
    the last one."""
    answer: str | None
    """The data row's reference answer, if it has one."""
    row: Mapping[str, Any]
    """The whole data row, `metadata` included: JSON types only."""
    truncated: bool
    """The response hit its token limit."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the rollouter passed on (`Trajectory.extra`): JSON types only. Of an episode of several rows, `rows` has the
    text of each."""
    response_ids: Sequence[int] | NDArray[np.int64] = field(default=(), compare=False, repr=False)
    """Every token after the prompt (of the last row), tool tokens and the stop token included. Only sent to functions
    with an attribute `reads_tokens = True`; empty for all others."""


class RewardFn(Protocol):
    """Returns a finite number for one sample, a `RewardRecord`, or None if the reward does not apply to it.

    Runs in a process that can be killed: if it raises or hangs, only that sample fails. Optional attributes: prepare: a
    function without arguments, called once before the first sample and outside its time limit; use it for slow imports.
    reads_tokens: True requests `RewardSample.response_ids`. checks_rows: True promises that a call with an empty
        response is quick, and raises ValueError for a row that cannot be graded whatever the response is. For
        registered rewards, rows are checked this way before a run starts.
    """

    def __call__(self, sample: RewardSample) -> float | RewardRecord | None: ...


class BatchRewardFn(Protocol):
    """As `RewardFn`, for several samples at once; the function has an attribute `batched = True`."""

    batched: bool

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float | RewardRecord | None]: ...


class DataSource(Protocol):
    """Yields the rows of `--data NAME:REST`: mappings of fields to values that JSON has.

    The keyword arguments are the options in `data.options`. One called `limit` gets the number of rows that are used.
    Optional attribute `check`: a function of `rest`, called before a run starts, that raises ConfigError if there is no
    such thing in the source, with the nearest name. It is quick: it imports nothing that takes a second.
    """

    def __call__(self, rest: str, **options: Any) -> Iterable[Mapping[str, Any]]: ...


class AdvantageEstimator(Protocol):
    """Adds `advantages` (and `returns`, if it computes them) to a whole step's batch.

    It declares with `@reads` the fields that must be prepared for it (`values` of a critic, `baseline_scores` of greedy
    responses).
    """

    def __call__(self, batch: Batch, **options: Any) -> Batch:
        """`batch` has `token_level_rewards`, `response_mask`, `scores`, `uid`, `valid`, and the declared fields."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """What a policy loss gets for a micro-batch: all flat `[N]` float32, whole rows, first positions masked.

    Outside the mask all of these tensors are 0, whatever the batch holds there.
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
    """Returns loss and metrics per token, `[N]` each; the caller applies the weights and sums both.

    Optional attributes:
        reads: see `reads`. A loss always gets `log_probs`, `old_log_probs` and `advantages`.
        zero_without_advantage: True promises that tokens with advantage 0 have no gradient. Rows with no other tokens
            are then left out of updates, and metrics are means over the remaining rows.
        whole_groups: True keeps rows of equal `uid` together in mini- and micro-batches.
        whole_samples: True keeps the rows of a sample together in micro-batches (in mini-batches they always are).
        on_policy_only: True says that the gradient has no ratio to `old_log_probs`. It is then correct only for the
            first update of a step, and a run with several updates per step prints a warning.
    """

    def __call__(self, inputs: PolicyLossInputs, **options: Any) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class LossAggregation(Protocol):
    """How the loss of a mini-batch is distributed over its tokens."""

    def __call__(self, batch: Batch, counted: Tensor, max_tokens: int | None) -> Tensor:
        """Weight of each token, `[N]`, in any float dtype; values outside `counted` are ignored.

        Args:
            batch: one whole mini-batch: the rows of one optimizer step, over all ranks.
            counted: `[N]` bool: response tokens of rows that carry loss.
            max_tokens: maximum number of response tokens in a row; None if unknown.
        """
        ...


class KlEstimator(Protocol):
    """KL(policy || reference) at each token, `[N]`, from the log-probs of the sampled tokens, `[N]` each.

    An optional attribute `not_as_loss` (a string) says why the estimator must not be differentiated; it can then be
    used in the reward only.
    """

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor: ...


class Tracker(Protocol):
    """Receives the run's metrics and samples."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrackerContext:
    """What a tracker is built from: `Tracker(context)`.

    A tracker with an attribute `option_names` reads no other options: they are refused before the run.
    """

    run_dir: str
    run_name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None
    """Step of the checkpoint that the run resumes from: steps logged after it will be logged again. None: the run
    repeats no step."""


class StepCallback(Protocol):
    """Called after each step with its number and metrics. An exception ends the run after a checkpoint is saved."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None: ...
