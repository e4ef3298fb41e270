"""An algorithm as one object: what it samples, which groups it takes, what it prepares, which updates it makes."""

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
    """The run's models, as an algorithm asks them."""

    @property
    def roles(self) -> Collection[str]:
        """Names of the roles that can be asked: `actor`, and as far as the run has them `ref`, `critic`, and every
        reward model."""
        ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Of every reward model, by role: the factor of its score in a sample's score."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that the actor has now."""
        ...

    def forward(self, role: str, batch: Batch, output: str) -> Tensor:
        """One output of a role's model for every row, without gradient: `log_probs`, `entropy`, `values` `[N]`, or
        `scores` `[B]`; float32.

        Raises:
            ConfigError: the run has no such role.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Example:
    """A given answer to a prompt, as tokens."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    """With the token that ends it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """One optimizer step of one role, or a gradient that the next one takes along."""

    role: str
    """`actor` or `critic`."""
    batch: Batch
    """With all that the objective reads, `loss_weight` included. Updates that share a batch share one copy of it."""
    rows: Tensor
    """`[M]` int64: rows of `batch` that this step sees, in this order."""
    objective: Objective
    fields: Sequence[str]
    """Of `batch`, that the objective reads besides `input_ids`."""
    adds: bool = False
    """True: its gradient is added to that of the next update of the same role, which makes the step for both."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """What an algorithm is built from: `MyAlgorithm(context)`."""

    config: Any
    """The run's configuration (`rlsdk.config.RunConfig`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`algorithm.options`."""
    examples: Sequence[Example] = ()
    """Given answers for a supervised term, where `algorithm.ptx.coef` is above 0."""
    comparable: bool = True
    """The sampler's log-probs are those of the contract, so that a ratio may be made of them."""
    function: Callable[[str, str], Any]
    """`function(kind, name)`: a registered function, or `pkg.mod:fn`, or `file.py:fn`; kind is `advantage`, `loss`,
    `aggregation` or `kl estimator`."""
    portable: Callable[[str, str], Any]
    """As `function`, in the form in which an objective takes it along to the workers."""


class Algorithm(ABC):
    """How groups become updates. Lives in the controller; asks models for numbers and owns no device.

    A step goes: `accepts` for each group as it is finished, then once `prepare`, `advantages`, `updates`. What a
    method adds to the batch is there for all rows, or not at all.
    """

    roles: ClassVar[Collection[str]] = ()
    """Models that it asks besides the actor: `ref`, `critic`. Known before anything is started."""

    def __init__(self, context: AlgorithmContext) -> None:
        """
        Args:
            context: the run.

        Raises:
            ConfigError: its options, or the run's configuration, cannot be.
        """
        self.context = context

    @property
    def num_samples(self) -> int:
        """Samples of each prompt: the group."""
        return int(self.context.config.trainer.samples_per_prompt)

    @property
    def greedy_baseline(self) -> bool:
        """One more response to each prompt, greedy, whose score stands in `baseline_scores`; it is not trained on."""
        return False

    @property
    def max_groups(self) -> int | None:
        """Most groups that are started for one step, where some are not accepted; past it, others are trained on.
        None: every group is taken."""
        return None

    def accepts(self, scores: Sequence[float]) -> bool:
        """Whether a group teaches anything; another prompt takes the place of one that does not.

        Args:
            scores: of its samples, those whose reward failed left out.
        """
        return True

    @abstractmethod
    def prepare(self, batch: Batch, models: Models) -> tuple[Batch, Mapping[str, float]]:
        """Adds what models compute: log-probs, values, scores. Called with whole groups, graded.

        Returns:
            The batch, and metrics to log.
        """

    @abstractmethod
    def advantages(self, batch: Batch) -> tuple[Batch, Mapping[str, float]]:
        """Adds `advantages` `[N]`, and what updates read besides.

        Returns:
            The batch, and metrics to log.
        """

    @abstractmethod
    def updates(self, batch: Batch, *, step: int) -> Sequence[Update]:
        """Optimizer steps, in the order in which they are made. All of them are decided before the first is.

        Args:
            batch: with advantages.
            step: number of trainer steps behind this one; a random cut is drawn from it.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """What it must remember for a resume: JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to remember is the default
        """Goes to where `state` was taken."""
