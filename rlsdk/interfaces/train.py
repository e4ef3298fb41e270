"""TrainEngine: what holds a model and changes it. One object per rank, all ranks get the same calls (SPMD)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlsdk.interfaces.batch import Batch
from rlsdk.interfaces.capability import Capability
from rlsdk.interfaces.errors import UnsupportedCapabilityError
from rlsdk.interfaces.model import OptimSpec, Parallel, RankContext, TrainSpec
from rlsdk.interfaces.weights import WeightLayout, WeightShard

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS = ("log_probs", "entropy", "values", "scores")
"""What may be asked of a forward pass. `log_probs`, `entropy`, `values`: flat `[N]` float32, 0 at the first position
of each row; log-probs and entropy in nats, of logits divided by `Batch.temperature`. `values` at t is the value of the
state in which token t is chosen. `scores`: `[B]` float32, read at each row's last token. Where the batch has a
`response_mask`, `log_probs` and `entropy` are 0 off it: no logits are made for what nobody reads. `values` and `scores`
are not masked: an objective leaves out what it does not learn from."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveResult:
    """What an objective made of one micro-batch."""

    loss: Tensor
    """Scalar: this micro-batch's share of the mini-batch loss. Shares add up; the engine never averages."""
    sums: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics that add over micro-batches and ranks."""
    maxima: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics of which the largest counts."""


@runtime_checkable
class Objective(Protocol):
    """A picklable function of the model's outputs and the micro-batch. It sees whole rows, and adds up.

    All normalisers are global and travel with the batch (`loss_weight`, `meta`), so the gradient is the same for
    every micro-batch size and every parallel split.

    An attribute `whole_groups`, where an objective has it and it is True, asks that rows of equal `uid` stay together:
    the objective compares them. The controller sends them to one data-parallel rank, and the engine puts them into one
    micro-batch (`rlsdk.kit.microbatch.groups_to_keep`).
    """

    @property
    def outputs(self) -> Sequence[str]:
        """Which of `OUTPUTS` it needs, with gradient."""
        ...

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        """`outputs` holds what was asked for, shaped as `OUTPUTS` says; `batch` is packed, on the same device."""
        ...


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardResult:
    """Metrics of one mini-batch, added up over micro-batches and all data-parallel ranks: equal on every rank."""

    loss: float
    sums: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    num_micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class OptimStepResult:
    """One optimizer step."""

    grad_norm: float
    """Global 2-norm before clipping."""
    lr: float
    """Used by this step."""
    skipped: bool = False
    """True when the gradient was not finite: weights, moments and schedule are as before, gradients are zero."""


class TrainEngine(ABC):
    """Order of calls: `initialize`, then any of the others, then `close`. Every method is collective: each rank calls
    it, in the same order, and blocks until its own part is done. Outputs are read from the ranks whose
    `parallel.is_collector` is true; the others may return an empty mapping.

    What may be asked of an engine, its host tracks (`rlsdk.kit.guarded_train`), so that no engine has to. It is never
    asked for: what needs parts that are offloaded (`forward`, `shards` and `save_pretrained` need the weights,
    `forward_backward` the gradients too, `save_checkpoint` weights and optimizer; `optim_step`, `load_checkpoint` and
    `reset_optimizer` all three); `offload` of what is off, or `onload` of what is on the device; an
    update of a frozen model (`TrainSpec.optim` is None); anything but `close` after `close`.
    """

    @abstractmethod
    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        """Builds model and optimizer on this rank, joins the process group.

        Raises:
            ConfigError: sizes that do not fit the model or the world size, with the arithmetic.
        """

    @property
    @abstractmethod
    def parallel(self) -> Parallel:
        """Where this rank stands."""

    @abstractmethod
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Computes `outputs` without gradient, on this data-parallel rank's rows.

        Args:
            batch: this rank's rows (the same on all ranks that share its `dp_rank`); needs `input_ids`. May be empty
                of rows: the rank still takes part in collectives.
            outputs: names of `OUTPUTS`.

        Returns:
            CPU float32 tensors, in the order of the batch's rows.
        """

    @abstractmethod
    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """Adds the gradient of the objective, summed over all rows of all ranks, to the gradients.

        The engine owns micro-batching, packing and schedules; it cuts `batch` into whole rows. The gradient after
        the call is that of the sum of all `ObjectiveResult.loss`, over micro-batches and data-parallel ranks.
        Several calls before `optim_step` add up.

        Raises:
            ConfigError: the objective asks for an unknown output.
            Exception: whatever the objective raised; gradients are then zero. Ranks that were not the ones to raise
                should raise too rather than wait for a collective that never comes.
        """

    @abstractmethod
    def optim_step(self) -> OptimStepResult:
        """Clips, steps optimizer and schedule, zeroes the gradients."""

    @abstractmethod
    def layout(self) -> WeightLayout:
        """What this rank holds, as boxes. Constant after `initialize`. Not collective."""

    @abstractmethod
    def shards(self) -> Iterator[WeightShard]:
        """Yields this rank's boxes in the order of `layout().boxes`: views, no copy, no communication."""

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Writes all that `load_checkpoint` needs to go on exactly: weights, optimizer, schedule, random state.

        `path` is an existing empty folder, the same on every rank, on storage that all share. No pickle.
        Returns when this rank's part is on disk.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Restores what `save_checkpoint` wrote; the next step is the one that would have followed.

        Raises:
            CheckpointError: the folder is not whole, or does not fit this model or split.
        """

    def save_pretrained(self, path: Path) -> None:
        """Writes `config.json` and safetensors in Hugging Face form (every rank calls; which of them write is
        the engine's choice)."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.EXPORT.value!r}")

    def offload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        """Moves these parts off the device."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.OFFLOAD.value!r}")

    def onload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        """Brings these parts back, bit for bit."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.OFFLOAD.value!r}")

    def reset_optimizer(self, optim: OptimSpec) -> None:
        """Starts afresh: zero moments, schedule at step 0, weights untouched. Asked where supervised training comes
        before reinforcement learning in one run (`sft.steps`)."""
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} cannot reset its optimizer, so it cannot be trained on answers before it is "
            "trained on rewards; run `rlsdk sft` first, then `rlsdk train --model` on what it wrote, without --sft"
        )

    def close(self) -> None:  # noqa: B027 - a working default: many engines hold nothing that needs closing
        """Leaves the process group and frees what the engine holds. Safe to call twice."""
