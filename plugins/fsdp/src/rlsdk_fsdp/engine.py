"""`fsdp`: a TrainEngine on torch FSDP2."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlsdk.interfaces import (
    Batch,
    ConfigError,
    ForwardBackwardResult,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    TrainSpec,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.memory.offload import HostOffload
from rlsdk.kit.model.adapters import add_adapter
from rlsdk.kit.model.context_parallel import check_model
from rlsdk.kit.model.hf import build_model, canonical_parameters
from rlsdk.kit.model.microbatch import check_limits
from rlsdk.kit.model.optim import build_optimizer, learning_rate, set_learning_rate
from rlsdk.kit.model.outputs import OutputModel
from rlsdk.kit.model.packed import can_pack
from rlsdk.kit.model.part_loading import load_weights
from rlsdk.kit.model.pass_plan import PassPlan
from rlsdk.kit.model.piece_engine import PieceEngine
from rlsdk.kit.model.rank_passes import collect_outputs, cut_alike, loss_of
from rlsdk.kit.ranks.error_agreement import raise_objective_errors
from rlsdk.kit.ranks.metric_sums import MetricSums
from rlsdk.kit.ranks.rendezvous import destroy_process_group, init_process_group
from rlsdk_fsdp import checkpoint
from rlsdk_fsdp.adapter import FsdpAdapter
from rlsdk_fsdp.config import WHOLE_GRADIENT_BYTES, FsdpOptions
from rlsdk_fsdp.shards import Piece, local, pieces_of
from rlsdk_fsdp.wrapping import (
    check_sizes,
    dtypes_of,
    forget_group,
    keep_shared,
    make_context,
    make_mesh,
    regain,
    release,
    set_reduction,
    shard,
)

PACKED = {"auto": None, "always": True, "never": False}


class FsdpTrainEngine(PieceEngine[Piece]):
    """Ranks process different rows, also those of different replicas (hybrid sharding); only `context_parallel`
    neighbours share theirs. Weights are sharded over all ranks.

    Weights are float32 shards along dimension 0, unless the model is frozen or `mixed_precision` is `none`. All ranks
    run the same number of micro-batches; a rank with fewer rows runs a token without weight instead.
    """

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.options = _options_of(spec)
        check_sizes(ctx, self.options)
        dtype, _ = dtypes_of(spec, self.options)
        check_limits(spec)
        self.device = torch.device(ctx.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        init_process_group(ctx, "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
        self.model = build_model(spec.model, empty=True, dtype=dtype).requires_grad_(spec.optim is not None)
        check_model(self.model, self.options.context_parallel, packs=can_pack(self.model))
        adapter = add_adapter(self.model, spec.model, trained=spec.optim is not None)
        if spec.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers recomputes in training mode only; `build_model` removed dropout
        self.split = make_context(ctx, self.options)
        self.outputs = OutputModel(self.model, spec.model.head, self.split)
        self.mesh = make_mesh(ctx, self.options)
        shard(self.outputs, self.model, spec, self.mesh)
        if self.device.type == "cpu" and spec.optim is not None:
            keep_shared(self.outputs)
        named, self.tied = canonical_parameters(self.model)
        self.pieces = pieces_of(named)
        load_weights(self.model, self.pieces, self.tied, spec.model, seed=ctx.seed, random=spec.init_from_config)
        copies = self.options.replicate_size
        self.adapter: FsdpAdapter | None = (
            None if adapter is None else FsdpAdapter(adapter, self.pieces, copies=copies, seed=ctx.seed)
        )
        self.trained = self.pieces if self.adapter is None else self.adapter.pieces
        num_values = sum(math.prod(piece.shape) for piece in self.trained)
        small = 4 * num_values <= WHOLE_GRADIENT_BYTES
        self.accumulates_shards = not small if self.options.accumulate == "auto" else self.options.accumulate != "whole"
        self.host_offload = HostOffload()
        self.num_steps = 0
        self.optim: OptimSpec | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optim is not None:
            self.reset_optimizer(spec.optim)

    def device_of(self, pieces: Sequence[Piece]) -> str:
        return "cpu" if self.options.cpu_offload else self.ctx.device

    @property
    def parallel(self) -> Parallel:
        size = self.options.context_parallel
        dp_rank, cp_rank = divmod(self.ctx.rank, size)
        return Parallel(dp_rank=dp_rank, dp_size=self.ctx.world_size // size, cp_rank=cp_rank, cp_size=size)

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        with torch.no_grad(), self._passes():
            cut = cut_alike(batch, self.spec)
            return collect_outputs(batch, cut, outputs, lambda rows: self._run(*self._send(rows), outputs))

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """See `TrainEngine`. If the objective raises on any rank, all gradients are dropped and every rank raises."""
        cut, metrics, failures = cut_alike(batch, self.spec, objective), MetricSums(), list[Exception]()
        with self._passes():
            for at, rows in enumerate(cut):
                is_last = at == len(cut) - 1
                set_reduction(self.outputs, self.options, sharded=self.accumulates_shards, last=is_last)
                part, plan = self._send(batch.select(rows))
                loss = loss_of(objective, self._run(part, plan, objective.outputs), part, metrics, failures)
                loss.backward()  # type: ignore[no-untyped-call]
            raise_objective_errors(failures)
        return metrics.reduce(len(cut), counts=self.parallel.is_collector)

    def optim_step(self) -> OptimStepResult:
        optimizer, spec = self._trained()
        lr = learning_rate(self.num_steps, spec)
        for piece in self.trained:
            piece.take_gradient()
        norm = self._clip(spec.max_grad_norm)
        finite = math.isfinite(norm)
        if finite:
            set_learning_rate(optimizer, lr)
            optimizer.step()
            self.num_steps += 1
            if self.adapter is not None:
                self.adapter.spread()
        self._drop_gradients()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)

    def save_checkpoint(self, path: Path) -> None:
        """See `TrainEngine`. Gradients are not part of a checkpoint: save after `optim_step`."""
        base, reference = self.below_adapter()
        checkpoint.save(path, self.trained, self.optimizer, self.num_steps, base=base, reference=reference)

    def load_checkpoint(self, path: Path) -> None:
        base, _ = self.below_adapter()
        self.num_steps, reference = checkpoint.load(path, self.trained, self.optimizer, base=base)
        if self.adapter is not None:
            self.adapter.reference.values = reference
            self.adapter.spread()
        self._drop_gradients()

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        """Moves `parts` to the host. Parts that are already there (on `cpu`, with `cpu_offload`) stay."""
        for part in parts if not self._on_host() else ():
            self.host_offload.offload(part, self._tensors_of(part))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        for part in parts:
            self.host_offload.onload(part)

    def reset_optimizer(self, optim: OptimSpec) -> None:
        learning_rate(0, optim)
        self.optim = optim
        self.num_steps = 0
        # Ranks without rows of a tensor have nothing to update in it.
        self.optimizer = build_optimizer(((p.name, p.held) for p in self.trained if p.box.numel), optim)

    def close(self) -> None:
        if vars(self).get("split") is not None and dist.is_initialized():
            dist.destroy_process_group(self.split.group)  # type: ignore[union-attr]
        if "ctx" in vars(self):
            destroy_process_group(self.ctx)
        if "mesh" in vars(self) and not dist.is_initialized():
            forget_group(self.mesh)
        vars(self).clear()
        gc.collect()  # reference cycles of wrapped modules would keep weights and process group alive

    def _trained(self) -> tuple[torch.optim.Optimizer, OptimSpec]:
        """Parts of a model that is trained."""
        assert self.optimizer is not None
        assert self.optim is not None
        return self.optimizer, self.optim

    def _send(self, rows: Batch) -> tuple[Batch, PassPlan]:
        """A micro-batch and the plan of its pass, on the device."""
        return self.outputs.send(rows, self.device, packed=PACKED[self.options.packing])

    def _run(self, part: Batch, plan: PassPlan, names: Sequence[str]) -> dict[str, Tensor]:
        """Outputs of a micro-batch on the device; without rows the model still runs, for its collectives."""
        found: dict[str, Tensor] = self.outputs(part, names, plan=plan)
        return found

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Context of passes: frees all gathered weights at the end, also after an error."""
        try:
            yield
            release(self.outputs)
        except BaseException:
            regain(self.outputs)
            if torch.is_grad_enabled():
                self._drop_gradients()
            raise

    def _clip(self, limit: float | None) -> float:
        """Clips the gradient to `limit`; returns its global 2-norm before clipping, the same on every rank."""
        stepped = [piece.held for piece in self.trained if piece.held.grad is not None and piece.box.numel]
        mine = get_total_norm([p.grad for p in stepped if p.grad is not None])
        total = mine.double().to(self.device).square()
        dist.all_reduce(total)
        norm = (total / self.options.replicate_size).sqrt()
        if limit is not None and stepped:
            clip_grads_with_norm_(stepped, limit, norm.float())
        return float(norm)

    def _drop_gradients(self) -> None:
        for piece in self.trained:
            piece.drop_gradient()

    def _on_host(self) -> bool:
        return self.device.type == "cpu" or self.options.cpu_offload

    def _tensors_of(self, part: str) -> list[Tensor]:
        if part == "weights":
            low = [] if self.adapter is None else self.adapter.tensors()
            return [*(piece.held for piece in self.pieces), *low]
        if part == "gradients":
            return [local(piece.parameter.grad) for piece in self.trained if piece.parameter.grad is not None]
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [state[moment] for state in states for moment in checkpoint.MOMENTS]


def _options_of(spec: TrainSpec) -> FsdpOptions:
    if spec.options is None:
        return FsdpOptions()
    if not isinstance(spec.options, FsdpOptions):
        raise ConfigError(
            f"TrainSpec.options is a {type(spec.options).__name__}; backend 'fsdp' expects an "
            "rlsdk_fsdp.config:FsdpOptions, or None for its defaults"
        )
    return spec.options
