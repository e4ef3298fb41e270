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
    """Global 2-norm before clipping, equal on every rank; 0 without a gradient, not finite if the step is skipped."""
    lr: float
    """Used by this step; of a skipped step, the rate it would have used, which the next step uses."""
    skipped: bool = False
    """True when the gradient was not finite: weights, moments and schedule are as before, gradients are zero."""


class TrainEngine(ABC):
    """Order of calls: `initialize`, then any of the others, then `close`; `close` also comes without `initialize`, and
    after one that raised. The host builds the class without arguments, once per rank and role: several engines may live
    in one process.

    Every method is collective, `parallel`, `layout` and `shards` excepted: each rank calls it, in the same order, and
    blocks until its own part is done. Outputs are read from the ranks whose `parallel.is_collector` is true; the others
    may return an empty mapping.

    All calls come from one thread, except that `shards` is also iterated on others: a sync reads weights there, at
    different times on each rank. No weight changes meanwhile; a checkpoint may be written.

    Deadlines (`deadlines.update_s`, `start_s`, `save_s`) run from the last sign of progress of any rank that is waited
    for. `rlsdk.kit.outputs`, `rlsdk.kit.export` and the objective give signs; code that works for long without them (a
    forward pass of your own, a loader, a checkpoint writer) calls `rlsdk.kit.progress.advance` at each micro-batch or
    tensor. Without signs a call that takes longer than its deadline ends the run with a DeadlineError.

    With `ModelSpec.dtype` bfloat16, a trained model computes in bfloat16, but steps float32 weights and adds up the
    gradients of micro-batches, calls and ranks in float32. `layout` and `shards` report what is held, normally those
    float32 weights, and a sync converts; `save_pretrained` writes `ModelSpec.dtype`. No requirement trains in float16,
    whose gradients need loss scaling: an engine that does not scale refuses it, or leaves it out of
    `BackendSpec.dtypes`. One that does unscales what it returns (`loss`, `grad_norm`).

    What may be asked of an engine, its host tracks (`rlsdk.kit.guarded_train`), so that no engine has to. It is never
    asked for: what needs parts that are offloaded (`forward`, `shards` and `save_pretrained` need the weights,
    `forward_backward` the gradients too, `save_checkpoint` weights and optimizer; `optim_step`, `load_checkpoint` and
    `reset_optimizer` all three); `offload` of what is off, or `onload` of what is on the device; an
    update of a frozen model (`TrainSpec.optim` is None); anything but `close` after `close`.
    """

    @abstractmethod
    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        """Builds model and optimizer on this rank, joins the process group.

        Join through `rlsdk.kit.rendezvous.init_process_group`: rank 0's process listens on `ctx.master_port` already,
        so that `torch.distributed.init_process_group` finds the address in use, and other engines of the process share
        its default group.

        Raises:
            ConfigError: sizes that do not fit the model or the world size, with the arithmetic; a model that is not
                there; none or both of the micro-batch limits, or a limit below 1; an unknown schedule, or one that
                decays without `total_steps`; a dtype, head or `engine_kwargs` that the engine does not take.
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

        Raises:
            ConfigError: an unknown output, one that the model's head does not give, or a temperature that is not above
                0 (`rlsdk.kit.outputs` raises all three).
        """

    @abstractmethod
    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """Adds the gradient of the objective, summed over all rows of all ranks, to the gradients.

        The engine owns micro-batching, packing and schedules; it cuts `batch` into whole rows. The gradient after
        the call is that of the sum of all `ObjectiveResult.loss`, over micro-batches and data-parallel ranks.
        Several calls before `optim_step` add up.

        Raises:
            ConfigError: the objective asks for an unknown output, or for one that the model's head does not give.
            Exception: whatever the objective raised; gradients are then zero. Ranks that were not the ones to raise
                should raise too rather than wait for a collective that never comes.
        """

    @abstractmethod
    def optim_step(self) -> OptimStepResult:
        """Clips, steps optimizer and schedule, zeroes the gradients.

        A step without any gradient (no call before it, or batches without rows) is not skipped: its norm is 0 and the
        schedule goes on. A gradient of zero is a step like any other: moments and weights decay.
        """

    @abstractmethod
    def layout(self) -> WeightLayout:
        """What this rank holds, as boxes. Constant after `initialize`. Not collective."""

    @abstractmethod
    def shards(self) -> Iterator[WeightShard]:
        """Yields this rank's boxes in the order of `layout().boxes`: views, no copy, no communication. Not collective,
        and not always on the engine's thread (see above)."""

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Writes all that `load_checkpoint` needs to go on exactly: weights, optimizer, schedule, and the state of
        torch's global generators on this rank. No method but `load_checkpoint` moves a global generator (torch's,
        numpy's, Python's), and no result depends on one.

        `path` is an existing empty folder, the same on every rank, on storage that all share. No pickle.
        Returns when this rank's part is on disk.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Restores what `save_checkpoint` wrote, and drops gradients; the next step is the one that would have
        followed. Only reads the folder: adds, changes and removes no file there.

        Raises:
            CheckpointError: the folder is not whole, or does not fit this model or split. Weights, optimizer and
                schedule stay as they were: check first, then copy.
        """

    def save_pretrained(self, path: Path) -> None:
        """Writes `config.json` and safetensors in Hugging Face form, in `ModelSpec.dtype` (every rank calls; which of
        them write is the engine's choice)."""
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
        """Leaves the process group and frees what the engine holds. Safe to call twice, before `initialize`, and after
        an `initialize` that raised.

        Leave through `rlsdk.kit.rendezvous.destroy_process_group`: `torch.distributed.destroy_process_group` would end
        the group of the other engines of the process too.
        """
