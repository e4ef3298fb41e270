"""TrainEngine: holds a model and updates it. One object per rank; all ranks get the same calls (SPMD)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlsdk.interfaces.batch import Batch
from rlsdk.interfaces.capability import Capability
from rlsdk.interfaces.errors import UnsupportedCapabilityError
from rlsdk.interfaces.model import ModelSpec, OptimSpec, Parallel, RankContext, TrainSpec
from rlsdk.interfaces.weights import WeightLayout, WeightPart, WeightShard

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS = (
    *("log_probs", "entropy", "values", "scores"),
    *("hidden_states", "divergence", "top_ids", "top_log_probs"),
)
"""Outputs of a forward pass. `log_probs`, `entropy`, `values`: flat `[N]` float32, 0 at the first position of each row;
log-probs and entropy in nats, of logits divided by `Batch.temperature`. `values` at t is the value of the state in
which token t is chosen. `scores`: `[B]` float32, read at each row's last token. If the batch has a `response_mask`,
`log_probs` and `entropy` are 0 outside it: unused logits are not computed. `values` and `scores` are not masked:
objectives must ignore positions that they do not train on.

With `Capability.DISTILLATION`, masked as log-probs are: `hidden_states` `[N, H]` float32, without gradient: at t the
last hidden state of which the logits of token t are made. `divergence` `[N]` float32, nats: of this model's
distribution at t from that of the teacher (`TrainEngine.load_teacher`), over the whole vocabulary
(`rlsdk.kit.model.divergence`). It reads the teacher's `hidden_states` from the batch's `teacher_states`, and
`teacher_temperature` and `divergence_beta` from its `meta`. A batch of several teachers says by `teacher_index` which
one teaches a row; the temperature of number I above 0 is `teacher_temperature.I`. `top_ids` int64 and `top_log_probs`
float32 `[N, k]`, without gradient: the k most probable tokens at t and their log-probs, the most probable one first; k
is `top_k` in `meta`. Of a batch with the teacher's `teacher_top_ids` and `teacher_top_log_probs` (at its temperature)
in place of its states, `divergence` is that between the distributions over these tokens and one more category, all
others."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveResult:
    """Result of an objective for one micro-batch."""

    loss: Tensor
    """Scalar: this micro-batch's share of the mini-batch loss. Shares add up; the engine never averages."""
    sums: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics that are summed over micro-batches and ranks."""
    maxima: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Metrics of which the maximum is kept."""


@runtime_checkable
class Objective(Protocol):
    """A picklable function of the model's outputs and the micro-batch. It gets whole rows, and its results are summed.

    All normalisers are global and part of the batch (`loss_weight`, `meta`), so the gradient is the same for every
    micro-batch size and every parallel split.

    An optional attribute `whole_groups = True` keeps rows of equal `uid` together, for objectives that compare them.
    The controller sends them to one data-parallel rank, and the engine puts them into one micro-batch
    (`rlsdk.kit.model.microbatch.groups_to_keep`). With `whole_samples = True` beside it, it is enough to keep together
    the rows of each sample (equal `uid` and `sample`); an engine may ignore this and keep whole groups.
    """

    @property
    def outputs(self) -> Sequence[str]:
        """Which of `OUTPUTS` it needs, with gradient."""
        ...

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        """`outputs` has the requested outputs, with the shapes given at `OUTPUTS`; `batch` is packed, on the same
        device, with all fields and metadata that the caller gave, in their dtypes whatever the model computes in."""
        ...


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardResult:
    """Metrics of one mini-batch, summed over micro-batches and all data-parallel ranks; equal on every rank."""

    loss: float
    sums: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    num_micro_batches: int = 1
    """Number of micro-batches of this rank: the one field that may differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class OptimStepResult:
    """One optimizer step."""

    grad_norm: float
    """Global 2-norm before clipping, equal on every rank; 0 without a gradient, not finite if the step is skipped."""
    lr: float
    """Learning rate of this step; for a skipped step, the rate it would have used, which the next step uses."""
    skipped: bool = False
    """True when the gradient's norm was not finite: weights, moments and schedule are as before, gradients are zero."""


class TrainEngine(ABC):
    """Order of calls: `initialize`, then any of the others, then `close`; `close` may also be called without
    `initialize`, and after an `initialize` that raised. The host constructs the class without arguments, once per rank
    and role: one process may have several engines.

    Every method except `parallel`, `layout`, `shards` and those of a part is collective: each rank calls it, in the
    same order, and blocks until its own part is done. Outputs are read from the ranks whose `parallel.is_collector` is
    true; the others may return an empty mapping.

    All calls come from one thread, except that a sync may iterate `shards` on other threads, at different times on each
    rank. No weight changes during that time; a checkpoint may be written.

    Deadlines (`deadlines.update_s`, `start_s`, `save_s`) count from the last progress reported by any rank of the call.
    `rlsdk.kit.model.outputs`, `rlsdk.kit.files.export` and the objective report progress; other long-running code (your
    own forward pass, a loader, a checkpoint writer) must call `rlsdk.kit.ranks.progress.advance` for each micro-batch
    or tensor. A call that exceeds its deadline without reporting progress ends the run with a DeadlineError.

    With `ModelSpec.dtype` bfloat16, a trained model computes in bfloat16, but the optimizer steps float32 weights, and
    gradients are accumulated in float32 over micro-batches, calls and ranks. `layout` and `shards` report what is held,
    normally those float32 weights, and a sync converts them; `save_pretrained` writes `ModelSpec.dtype`. No requirement
    trains in float16, whose gradients need loss scaling: an engine without loss scaling refuses float16, or leaves it
    out of `BackendSpec.dtypes`. An engine with loss scaling returns unscaled values (`loss`, `grad_norm`).

    With `ModelSpec.adapter` (`Capability.LORA`) only A and B are trained: the optimizer, `grad_norm` and checkpoints
    hold nothing else, and a checkpoint refuses another base at `load_checkpoint` (CheckpointError). `layout` and
    `shards` describe the canonical weights with the adapter added in float32, then rounded to `ModelSpec.dtype`: those
    of adapted weights are new memory, so a sync needs room for them. `save_pretrained` writes PEFT's two files, or
    with `AdapterSettings.export` "merged" these weights.

    The host checks the order of calls (`rlsdk.kit.guards.guarded_train`), so engines need not. It never makes: a call
    that needs an offloaded part (`forward`, `shards` and `save_pretrained` need the weights, `forward_backward` also
    the gradients, `save_checkpoint` weights and optimizer; `optim_step`, `load_checkpoint` and `reset_optimizer` all
    three); `offload` of a part that is off the device, or `onload` of one that is on it; an update of a frozen model
    (`TrainSpec.optim` is None); any call but `close` after `close`.

    A call that raises `ConfigError` changes nothing: it is refused before the engine does anything. Only
    `forward_backward` may then drop the gradients of earlier calls. What an engine holds (memory, threads, open files)
    does not grow with the number of calls.
    """

    @abstractmethod
    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        """Builds model and optimizer on this rank and joins the process group.

        Join with `rlsdk.kit.ranks.rendezvous.init_process_group`. Do not call `torch.distributed.init_process_group`:
        rank 0's process already listens on `ctx.master_port`, so the address would be in use, and other engines of the
        process share its default group.

        Raises:
            ConfigError: sizes that do not fit the model or the world size, with the arithmetic; a model that does not
                exist, or whose files lack a tensor other than those of a value or score head; none or both of the
                micro-batch limits, or a limit below 1; an unknown schedule, or one that decays without `total_steps`; a
                dtype, head or `engine_kwargs` that the engine does not support.
        """

    @property
    @abstractmethod
    def parallel(self) -> Parallel:
        """This rank's position on every parallel axis."""

    @abstractmethod
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Computes `outputs` without gradient, on this data-parallel rank's rows.

        Args:
            batch: this rank's rows (the same on all ranks that share its `dp_rank`); needs `input_ids`. May have no
                rows: the rank still takes part in collectives.
            outputs: names of `OUTPUTS`.

        Returns:
            CPU float32 tensors, in the order of the batch's rows. They belong to the caller, who may write into them.

        Raises:
            ConfigError: an unknown output, one that the model's head does not produce, or a temperature that is not
                above 0 (`rlsdk.kit.model.outputs` raises all three).
        """

    @abstractmethod
    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """Adds the gradient of the objective, summed over all rows of all ranks, to the gradients.

        The engine is responsible for micro-batching, packing and pipeline schedules; it splits `batch` at row
        boundaries. The added gradient is that of the sum of all `ObjectiveResult.loss`, over micro-batches and
        data-parallel ranks, and of nothing else: losses that a model's code adds by itself (balance of a router) are
        left out. Several calls before `optim_step` accumulate.

        Raises:
            ConfigError: the objective requests an unknown output, or one that the model's head does not produce.
            Exception: whatever the objective raised; gradients are then zero. The other ranks should raise too, and not
                wait in a collective that never completes.
        """

    @abstractmethod
    def optim_step(self) -> OptimStepResult:
        """Clips, steps optimizer and schedule, zeroes the gradients.

        A step without any gradient (no call before it, or batches without rows) is not skipped: its norm is 0 and the
        schedule advances; whether moments and weights decay then is left to the engine. A gradient of zero is a normal
        step: moments and weights decay.
        """

    @abstractmethod
    def layout(self) -> WeightLayout:
        """The weights that this rank holds, as boxes. Constant after `initialize`. Not collective."""

    @abstractmethod
    def shards(self) -> Iterator[WeightShard]:
        """Yields this rank's boxes in the order of `layout().boxes`: views, no copy, no communication. Not collective,
        and not always on the engine's thread (see above). A caller may stop early, or iterate twice at once: between
        two items the engine holds no lock, and torch's settings of the thread (grad mode) are the caller's."""

    def part_layout(self, part: WeightPart) -> WeightLayout:
        """As `layout`, of the frozen weights or of the adapter alone; without a part of these, it has no boxes. Called
        only with `ModelSpec.adapter`."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ADAPTER_SYNC.value!r}")

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        """As `shards`, in the order of `part_layout(part).boxes`: views of what is held, with nothing added."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ADAPTER_SYNC.value!r}")

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Writes everything that `load_checkpoint` needs for an exact resume: weights, optimizer, schedule, and the
        state of torch's global random generators on this rank. Only `load_checkpoint` may change a global generator
        (torch's, numpy's, Python's), and no result depends on one.

        `path` is an existing empty folder on shared storage, the same on every rank. Do not use pickle. Returns when
        this rank's part is on disk.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Restores what `save_checkpoint` wrote, and drops gradients; the next step is the one that would have
        followed. The settings of that step (rate, betas, decay, clipping, schedule) are those of this engine's latest
        `OptimSpec`, whatever the engine that saved had. Only reads the folder: does not add, change or remove files.

        Raises:
            CheckpointError: the checkpoint is incomplete, or does not fit this model or split; every rank raises, even
                if only one rank's part is damaged. Weights, optimizer and schedule stay unchanged: check first, then
                copy.
        """

    def save_pretrained(self, path: Path) -> None:
        """Writes a folder in Hugging Face form (every rank calls; which of them write is the engine's choice):
        parameters in `ModelSpec.dtype`, persistent buffers in their own dtype, a `config.json` with all fields of the
        model's own, and the tokenizer files of the model's folder (`rlsdk.kit.files.export.write_model` does all of
        it)."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.EXPORT.value!r}")

    def forward_reference(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """As `forward`, of the policy at the last `keep_reference`; without one, of the model without its adapter,
        bit-equal to a model that never had one. Called only with `ModelSpec.adapter`."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.LORA.value!r}")

    def keep_reference(self) -> None:
        """Copies the adapter as it is now for `forward_reference`; part of checkpoints from then on."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.LORA.value!r}")

    def moved_share(self) -> float:
        """Share of the elements of adapted weights that the adapter changes in the dtype in which `shards` yields them:
        in bfloat16, small changes are lost by rounding. Collective; equal on every rank."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.LORA.value!r}")

    def load_teacher(self, spec: ModelSpec, number: int = 0) -> None:
        """Loads the head of a teacher, the layers above its backbone, for the output `divergence`. The head stays; a
        later call with the same number replaces it. Collective; called before the first batch that needs it.

        Args:
            spec: the teacher.
            number: of the teacher, from 0 on: `teacher_index` of the rows that it teaches. 0 where there is one.

        Raises:
            ConfigError: its checkpoint cannot be read.
        """
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.DISTILLATION.value!r}")

    def offload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        """Moves these parts off the device."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.OFFLOAD.value!r}")

    def onload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        """Brings these parts back, bit for bit."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.OFFLOAD.value!r}")

    def reset_optimizer(self, optim: OptimSpec) -> None:
        """Resets the optimizer: zero moments, schedule at step 0, weights unchanged. Called when one run does
        supervised training before reinforcement learning (`sft.steps`), between two steps: no gradients are pending.

        Raises:
            ConfigError: a schedule that `initialize` would refuse; the optimizer is then as it was.
        """
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} cannot reset its optimizer, so it cannot be trained on answers before it is "
            "trained on rewards; run `rlsdk sft` first, then `rlsdk train --model` on what it wrote, without --sft"
        )

    def close(self) -> None:  # noqa: B027 - a working default: many engines hold nothing that needs closing
        """Leaves the process group and frees what the engine holds: processes, threads, ports, files, shared and device
        memory. All is free when it returns: weights in a circle of references, as hooks from parameters to their
        modules make, would stay until Python collects garbage. Safe to call twice, before `initialize`, and after an
        `initialize` that raised.

        Leave the group with `rlsdk.kit.ranks.rendezvous.destroy_process_group`:
        `torch.distributed.destroy_process_group` would also destroy the groups of other engines in the process.
        """
