"""An algorithm as one object: what it samples, which groups it accepts, what it prepares, which updates it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlsdk.interfaces.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.interfaces.train import Objective


class Models(Protocol):
    """The run's models, as an algorithm calls them."""

    @property
    def roles(self) -> Collection[str]:
        """Roles that can be called: `actor`, and, if the run has them, `ref`, `critic`, reward models and teachers."""
        ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight of each reward model's score in a sample's score, by role."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the actor's current weights."""
        ...

    def forward(self, role: str, batch: Batch, output: str) -> Tensor:
        """One output of a role's model for every row, without gradient: `log_probs`, `entropy`, `values` `[N]`,
        `scores` `[B]`, or `hidden_states` `[N, H]`; float32.

        Raises:
            ConfigError: the run has no such role.
        """
        ...

    def outputs(self, role: str, batch: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Several outputs of one pass; see `forward`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and its reference answer, as tokens."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    """Includes the end token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """One optimizer step of one role, or a gradient that is accumulated into the next one."""

    role: str
    """`actor` or `critic`."""
    batch: Batch
    """Has every field that the objective reads, `loss_weight` included. Updates that share a batch share one copy of
    it."""
    rows: Tensor
    """`[M]` int64: rows of `batch` that this step uses, in this order."""
    objective: Objective
    fields: Sequence[str]
    """Fields of `batch` that the objective reads in addition to `input_ids`."""
    adds: bool = False
    """True: the gradient is added to that of the role's next update, which makes the optimizer step for both."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """What an algorithm is built from: `MyAlgorithm(context)`."""

    config: Any
    """The run's configuration (`rlsdk.config.RunConfig`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`algorithm.options`."""
    examples: Sequence[Example] = ()
    """Reference answers for a supervised loss term; used when `algorithm.ptx.coef` is above 0."""
    comparable: bool = True
    """True: the sampler's log-probs follow the contract, so importance ratios may be computed from them."""
    function: Callable[[str, str], Any]
    """`function(kind, name)`: a registered function, or `pkg.mod:fn`, or `file.py:fn`; kind is `advantage`, `loss`,
    `aggregation` or `kl estimator`."""
    portable: Callable[[str, str], Any]
    """As `function`, but returns a picklable form that an objective can carry to the workers."""


class Algorithm(ABC):
    """How groups become updates. Runs in the controller, calls models for outputs, and owns no device.

    In each step, `accepts` is called for every group as it finishes, then `prepare`, `advantages` and `updates` once
    each. A field that a method adds to the batch must cover all rows.
    """

    roles: ClassVar[Collection[str]] = ()
    """Models that it calls in addition to the actor: `ref`, `critic`. Read before anything is started."""

    def __init__(self, context: AlgorithmContext) -> None:
        """
        Args:
            context: the run.

        Raises:
            ConfigError: its options, or the run's configuration, are invalid.
        """
        self.context = context

    @property
    def num_samples(self) -> int:
        """Samples per prompt: the group size."""
        return int(self.context.config.trainer.samples_per_prompt)

    @property
    def greedy_baseline(self) -> bool:
        """True: each prompt gets one more, greedy response. Its score goes into `baseline_scores`; it is not trained
        on."""
        return False

    @property
    def max_groups(self) -> int | None:
        """Maximum number of groups to start for one step when some are not accepted; once it is reached, rejected
        groups are trained on. None: every group is accepted."""
        return None

    def accepts(self, scores: Sequence[float]) -> bool:
        """Whether a group has a training signal; a group that is rejected is replaced by another prompt.

        Args:
            scores: scores of its samples, without those whose reward failed.
        """
        return True

    @abstractmethod
    def prepare(self, batch: Batch, models: Models) -> tuple[Batch, Mapping[str, float]]:
        """Adds what models compute: log-probs, values, scores. Called with whole groups that are already graded.

        Returns:
            The batch, and metrics to log.
        """

    @abstractmethod
    def advantages(self, batch: Batch) -> tuple[Batch, Mapping[str, float]]:
        """Adds `advantages` `[N]`, and any other fields that updates read.

        Returns:
            The batch, and metrics to log.
        """

    @abstractmethod
    def updates(self, batch: Batch, *, step: int) -> Sequence[Update]:
        """Optimizer steps, in execution order. All of them are decided before the first one runs.

        Args:
            batch: with advantages.
            step: number of trainer steps completed before this one; seeds any random split.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """State that a resume needs: JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to remember is the default
        """Restores what `state_dict` returned."""
