"""`deepspeed`: a TrainEngine on DeepSpeed's ZeRO."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Head,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    TrainSpec,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.memory.offload import HostOffload
from rlsdk.kit.model.adapters import ModelAdapter, add_adapter
from rlsdk.kit.model.hf import build_model, canonical_parameters
from rlsdk.kit.model.microbatch import check_limits
from rlsdk.kit.model.optim import adamw, learning_rate, set_learning_rate
from rlsdk.kit.model.outputs import OutputModel, layers_above
from rlsdk.kit.model.part_loading import load_weights
from rlsdk.kit.model.pass_plan import PassPlan
from rlsdk.kit.model.piece_engine import PieceEngine
from rlsdk.kit.model.rank_passes import collect_outputs, cut_alike, loss_of
from rlsdk.kit.ranks.error_agreement import raise_objective_errors
from rlsdk.kit.ranks.metric_sums import MetricSums
from rlsdk.kit.ranks.rendezvous import destroy_process_group, init_process_group
from rlsdk_deepspeed import checkpoint, library
from rlsdk_deepspeed.adapter import DeepSpeedAdapter
from rlsdk_deepspeed.shards import Piece, pieces_of
from rlsdk_deepspeed.sizes import check_options, dtype_of, options_of

PACKED = {"auto": None, "always": True, "never": False}


class DeepSpeedTrainEngine(PieceEngine[Piece]):
    """Every rank is a data-parallel rank. The optimizer steps float32 weights, of which each rank has a part.

    All ranks run the same number of micro-batches; a rank with fewer rows runs a token without weight instead.
    """

    engine: Any = None
    """DeepSpeed's; None for a frozen model that is whole on each rank, which needs none."""
    stage: int
    """Of ZeRO; 0: every rank has the whole parameters."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.options = options_of(spec)
        check_options(self.options)
        library.check_kwargs(spec)
        dtype = dtype_of(spec)
        check_limits(spec)
        self.optim: OptimSpec | None = spec.optim
        if spec.optim is not None:
            learning_rate(0, spec.optim)
        self.device = torch.device(ctx.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        init_process_group(ctx, "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
        self.model = build_model(spec.model, empty=True, dtype=dtype).requires_grad_(spec.optim is not None)
        adapter = add_adapter(self.model, spec.model, trained=spec.optim is not None)
        if spec.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers recomputes in training mode only; `build_model` removed dropout
        # ZeRO 2 lays gradients out in the order in which they come, and adds those of all ranks at the same place.
        self.outputs = OutputModel(self.model, spec.model.head, steady=True)
        self._start(dtype, adapter)
        load_weights(self.model, self.pieces, self.tied, spec.model, seed=ctx.seed, random=spec.init_from_config)
        copies = 1 if self.stage == 3 else ctx.world_size
        self.adapter: DeepSpeedAdapter | None = None
        if adapter is not None:
            self.adapter = DeepSpeedAdapter(adapter, self.trained, self.pieces, copies=copies, seed=ctx.seed)
            self.adapter.reference.filled = self._refresh
        self._refresh()
        self.host_offload = HostOffload()
        self.num_steps = 0
        self.pending = False

    def _start(self, dtype: torch.dtype, adapter: ModelAdapter | None) -> None:
        """Hands the model, without values, to DeepSpeed, and finds this rank's parts: `pieces` of the model, and
        `trained` of what the optimizer steps, the same ones without an adapter."""
        low = {} if adapter is None else adapter.parameters
        shapes = {name: tuple(p.shape) for name, p in {**canonical_parameters(self.model)[0], **low}.items()}
        trained, self.stage = self.spec.optim is not None, self.options.zero_stage
        num_values = sum(math.prod(shapes[name]) for name in low or shapes)
        mixed = dtype is torch.bfloat16 and adapter is None
        config = library.settings(self.spec, self.options, bfloat16=mixed, num_values=num_values)
        split = library.Partitioner(self.ctx, config, dtype) if self.stage == 3 else None
        library.materialise(self.outputs, self.device, dtype, split, low.values())
        named, self.tied = canonical_parameters(self.model)
        low = {} if adapter is None else adapter.parameters
        stepped, frozen = (low, named) if low else (named, {})
        if trained or self.stage == 3:
            optimizer = self._new_optimizer(stepped, shapes) if trained else None
            self.engine = library.start(self.ctx, self.outputs, optimizer, config)
            if self.stage == 3:
                library.keep_whole(self.engine, low.values())
                if self.spec.model.head is Head.LM:
                    library.keep_gathered(self.engine, layers_above(self.model))
            if trained and self.device.type == "cpu":
                library.keep_shared(self.engine, self.stage, frozen.values())
        else:
            self.stage = 0
        names = {id(parameter): name for name, parameter in {**named, **low}.items()}
        place, is_split = (self.ctx.rank, self.ctx.world_size), self.stage == 3
        groups = (
            library.groups_of(self.engine, self.stage)
            if trained
            else library.frozen_groups(stepped.values(), split=is_split)
        )
        self.trained = pieces_of(groups, names, {name: shapes[name] for name in stepped}, self.stage, place)
        self.pieces = self.trained
        if adapter is not None:
            below = library.frozen_groups(frozen.values(), split=is_split)
            self.pieces = pieces_of(below, names, {name: shapes[name] for name in frozen}, 3 * is_split, place)
        self.optimizer: torch.optim.Optimizer | None = self.engine.optimizer.optimizer if trained else None

    def _new_optimizer(self, named: Any, shapes: Any) -> torch.optim.Optimizer:
        assert self.spec.optim is not None
        decayed = [parameter for name, parameter in named.items() if len(shapes[name]) >= 2]
        plain = [parameter for name, parameter in named.items() if len(shapes[name]) < 2]
        return adamw(decayed, plain, self.spec.optim)

    def device_of(self, pieces: Sequence[Piece]) -> str:
        return "cpu" if any(piece.flat.device.type == "cpu" for piece in pieces if piece.parts) else self.ctx.device

    @property
    def parallel(self) -> Parallel:
        return Parallel(dp_rank=self.ctx.rank, dp_size=self.ctx.world_size)

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        with torch.no_grad(), self._passes():
            cut = cut_alike(batch, self.spec)
            found = collect_outputs(batch, cut, outputs, lambda rows: self._run(*self._send(rows), outputs))
            self._gather_adapter()
        return found

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """See `TrainEngine`. If the objective raises on any rank, all gradients are dropped and every rank raises."""
        cut, metrics, failures = cut_alike(batch, self.spec, objective), MetricSums(), list[Exception]()
        with self._passes():
            for rows in cut:
                part, plan = self._send(batch.select(rows))
                loss = loss_of(objective, self._run(part, plan, objective.outputs), part, metrics, failures)
                # DeepSpeed averages over ranks; the contract requires the sum.
                self.engine.backward(loss * self.ctx.world_size)
            self._gather_adapter()
            raise_objective_errors(failures)
        self.pending = True
        return metrics.reduce(len(cut))

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        lr = learning_rate(self.num_steps, self.optim)
        norm = 0.0
        if self.pending:
            zero = self.engine.optimizer
            set_learning_rate(zero.optimizer, lr)
            zero.clip_grad = self.optim.max_grad_norm or 0.0
            with library.launcher_variables(self.ctx):
                self.engine.step()
            norm = math.inf if zero.overflow else float(zero._global_grad_norm)
            self._drop_gradients()
        skipped = not math.isfinite(norm)
        self.num_steps += not skipped
        if skipped and self.adapter is not None:
            self._refresh()  # DeepSpeed has split A and B for the step
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=skipped)

    def save_checkpoint(self, path: Path) -> None:
        """See `TrainEngine`. Gradients are not part of a checkpoint: save after `optim_step`."""
        base, reference = self.below_adapter()
        checkpoint.save(path, self.trained, self.optimizer, self.num_steps, base=base, reference=reference)

    def load_checkpoint(self, path: Path) -> None:
        base, _ = self.below_adapter()
        self.num_steps, reference = checkpoint.load(path, self.trained, self.optimizer, base=base)
        if self.adapter is not None:
            self.adapter.reference.values = reference
        self._refresh()
        self._drop_gradients()

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        """Moves `parts` to the host; on `cpu` they are there."""
        for part in parts if self.device.type != "cpu" else ():
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
        assert self.optimizer is not None
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            decay = optim.weight_decay if group is self.optimizer.param_groups[0] else 0.0
            group.update(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=decay)

    def close(self) -> None:
        if self.engine is not None:
            library.finish(self.engine)
        if "ctx" in vars(self):
            destroy_process_group(self.ctx)
            if not dist.is_initialized():
                library.forget_group()
        vars(self).clear()
        gc.collect()  # reference cycles of wrapped modules would keep weights and process group alive

    def _send(self, rows: Batch) -> tuple[Batch, PassPlan]:
        """A micro-batch and the plan of its pass, on the device."""
        return self.outputs.send(rows, self.device, packed=PACKED[self.options.packing])

    def _run(self, part: Batch, plan: PassPlan, names: Sequence[str]) -> dict[str, Tensor]:
        """Outputs of a micro-batch on the device; without rows the model still runs, for its collectives."""
        run = self.engine if self.engine is not None else self.outputs
        found: dict[str, Tensor] = run(part, names, plan=plan)
        return library.joined(found) if self.stage == 3 else found

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Context of passes: after an error in one with gradient, all gradients are dropped."""
        try:
            with library.launcher_variables(self.ctx):
                yield
        except BaseException:
            if torch.is_grad_enabled():
                self._drop_gradients()
            raise

    def _gather_adapter(self) -> None:
        """Lets `shards` find A and B whole, which add them without communication. Collective."""
        if self.adapter is not None and self.stage == 3:
            library.gather(self.adapter.adapter.parameters.values())

    def _refresh(self) -> None:
        if self.engine is not None:
            with library.launcher_variables(self.ctx):
                library.refresh(self.engine, self.stage)

    def _drop_gradients(self) -> None:
        self.pending = False
        if self.optimizer is not None:
            library.drop_gradients(self.engine, self.stage)

    def _tensors_of(self, part: str) -> list[Tensor]:
        if part == "weights":
            low = [] if self.adapter is None else self.adapter.tensors()
            run = library.weights_of(self.engine, self.stage) if self.engine is not None else []
            return [*(piece.flat for piece in self.pieces), *low, *run]
        if part == "gradients":
            return library.gradients_of(self.engine, self.stage) if self.optimizer is not None else []
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [state[moment] for state in states for moment in checkpoint.MOMENTS]
