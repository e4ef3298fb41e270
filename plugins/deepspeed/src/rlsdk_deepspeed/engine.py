"""`deepspeed`: a TrainEngine on DeepSpeed's ZeRO."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    Box,
    ForwardBackwardResult,
    Head,
    ModelSpec,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    TensorMeta,
    TrainEngine,
    TrainSpec,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit.files.export import ExportedTensor, in_dtype, write_model
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.memory.offload import HostOffload
from rlsdk.kit.model.divergence import load_teacher_head
from rlsdk.kit.model.hf import build_model, canonical_parameters, dtype_names, persistent_buffers
from rlsdk.kit.model.microbatch import check_limits
from rlsdk.kit.model.optim import adamw, learning_rate, set_learning_rate
from rlsdk.kit.model.outputs import OutputModel, TeacherHead, layers_above
from rlsdk.kit.model.part_loading import load_weights
from rlsdk.kit.model.pass_plan import PassPlan
from rlsdk.kit.model.rank_passes import collect_outputs, cut_alike, loss_of
from rlsdk.kit.ranks.error_agreement import raise_objective_errors, raise_on_all_ranks
from rlsdk.kit.ranks.metric_sums import MetricSums
from rlsdk.kit.ranks.rendezvous import destroy_process_group, init_process_group
from rlsdk_deepspeed import checkpoint, library
from rlsdk_deepspeed.shards import Group, pieces_of
from rlsdk_deepspeed.sizes import check_options, dtype_of, options_of

PACKED = {"auto": None, "always": True, "never": False}


class DeepSpeedTrainEngine(TrainEngine):
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
        if spec.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers recomputes in training mode only; `build_model` removed dropout
        self.outputs = OutputModel(self.model, spec.model.head)
        self._start(dtype)
        load_weights(self.model, self.pieces, self.tied, spec.model, seed=ctx.seed, random=spec.init_from_config)
        self._refresh()
        self.host_offload = HostOffload()
        self.num_steps = 0
        self.pending = False

    def _start(self, dtype: torch.dtype) -> None:
        """Hands the model, without values, to DeepSpeed, and finds this rank's parts."""
        shapes = {name: tuple(parameter.shape) for name, parameter in canonical_parameters(self.model)[0].items()}
        num_values = sum(map(math.prod, shapes.values()))
        trained, self.stage = self.spec.optim is not None, self.options.zero_stage
        config = library.settings(self.spec, self.options, bfloat16=dtype is torch.bfloat16, num_values=num_values)
        split = library.Partitioner(self.ctx, config, dtype) if self.stage == 3 else None
        library.materialise(self.outputs, self.device, dtype, split)
        named, self.tied = canonical_parameters(self.model)
        if trained or self.stage == 3:
            optimizer = self._new_optimizer(named, shapes) if trained else None
            self.engine = library.start(self.ctx, self.outputs, optimizer, config)
            if self.stage == 3 and self.spec.model.head is Head.LM:
                library.keep_gathered(self.engine, layers_above(self.model))
            if trained and self.device.type == "cpu":
                library.keep_shared(self.engine, self.stage)
            groups = library.groups_of(self.engine, self.stage)
        else:
            self.stage = 0
            groups = [Group(parameter.data.view(-1), [parameter]) for parameter in named.values()]
        names = {id(parameter): name for name, parameter in named.items()}
        self.pieces = pieces_of(groups, names, shapes, self.stage, (self.ctx.rank, self.ctx.world_size))
        self.optimizer: torch.optim.Optimizer | None = self.engine.optimizer.optimizer if trained else None

    def _new_optimizer(self, named: Any, shapes: Any) -> torch.optim.Optimizer:
        assert self.spec.optim is not None
        decayed = [parameter for name, parameter in named.items() if len(shapes[name]) >= 2]
        plain = [parameter for name, parameter in named.items() if len(shapes[name]) < 2]
        return adamw(decayed, plain, self.spec.optim)

    @property
    def parallel(self) -> Parallel:
        return Parallel(dp_rank=self.ctx.rank, dp_size=self.ctx.world_size)

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        with torch.no_grad(), self._passes():
            cut = cut_alike(batch, self.spec)
            return collect_outputs(batch, cut, outputs, lambda rows: self._run(*self._send(rows), outputs))

    def load_teacher(self, spec: ModelSpec) -> None:
        self.outputs.teacher = TeacherHead(load_teacher_head(spec, self.device))

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """See `TrainEngine`. If the objective raises on any rank, all gradients are dropped and every rank raises."""
        cut, metrics, failures = cut_alike(batch, self.spec, objective), MetricSums(), list[Exception]()
        with self._passes():
            for rows in cut:
                part, plan = self._send(batch.select(rows))
                loss = loss_of(objective, self._run(part, plan, objective.outputs), part, metrics, failures)
                # DeepSpeed averages over ranks; the contract requires the sum.
                self.engine.backward(loss * self.ctx.world_size)
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
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=skipped)

    def layout(self) -> WeightLayout:
        held = [piece for piece in self.pieces if piece.parts]
        # Every rank has the full tensors.
        buffers = persistent_buffers(self.model)
        return WeightLayout(
            rank=self.ctx.rank,
            node=self.ctx.node,
            device=str(self.pieces[0].flat.device) if self._on_host() else self.ctx.device,
            process=f"{self.ctx.node}:{os.getpid()}",
            tensors=tuple(
                TensorMeta(name=p.name, shape=p.shape, dtype=str(p.flat.dtype).removeprefix("torch.")) for p in held
            )
            + tuple(
                TensorMeta(name=name, shape=tuple(buffers[name].shape), dtype=dtype)
                for name, dtype in dtype_names(buffers).items()
            ),
            boxes=(
                *((piece.name, box) for piece in held for box in piece.boxes),
                *((name, Box.whole(tuple(buffer.shape))) for name, buffer in buffers.items()),
            ),
            tied=self.tied,
        )

    def shards(self) -> Iterator[WeightShard]:
        for piece in self.pieces:
            for box, values in piece.parts:
                yield WeightShard(name=piece.name, box=box, tensor=values)
        for name, buffer in persistent_buffers(self.model).items():
            yield WeightShard(name=name, box=Box.whole(tuple(buffer.shape)), tensor=buffer.detach())

    def save_checkpoint(self, path: Path) -> None:
        """See `TrainEngine`. Gradients are not part of a checkpoint: save after `optim_step`."""
        checkpoint.save(path, self.pieces, self.optimizer, self.num_steps)

    def load_checkpoint(self, path: Path) -> None:
        self.num_steps = checkpoint.load(path, self.pieces, self.optimizer)
        self._refresh()
        self._drop_gradients()

    def save_pretrained(self, path: Path) -> None:
        """See `TrainEngine`. Ranks write files concurrently; each tensor is gathered only on its writer."""
        pieces = {piece.name: piece for piece in self.pieces}
        buffers = persistent_buffers(self.model)
        tensors = in_dtype({piece.name: piece.shape for piece in self.pieces}, getattr(torch, self.spec.model.dtype))
        tensors += [ExportedTensor(name=name, shape=tuple(b.shape), dtype=b.dtype) for name, b in buffers.items()]

        def fetch(tensor: ExportedTensor, writer: int) -> Tensor | None:
            if tensor.name in buffers:
                return buffers[tensor.name]
            return pieces[tensor.name].gather(writer, tensor.dtype)

        with raise_on_all_ranks(f"{path} cannot be written"):
            write_model(
                path,
                self.model.config,
                tensors,
                fetch,
                rank=self.ctx.rank,
                world_size=self.ctx.world_size,
                source=self.spec.model.path,
            )

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

    def _refresh(self) -> None:
        if self.engine is not None:
            with library.launcher_variables(self.ctx):
                library.refresh(self.engine, self.stage)

    def _drop_gradients(self) -> None:
        self.pending = False
        if self.optimizer is not None:
            library.drop_gradients(self.engine, self.stage)

    def _on_host(self) -> bool:
        return self.device.type == "cpu" or self.options.offload_optimizer

    def _tensors_of(self, part: str) -> list[Tensor]:
        if part == "weights":
            return [piece.flat for piece in self.pieces] + (
                library.weights_of(self.engine, self.stage) if self.engine is not None else []
            )
        if part == "gradients":
            return library.gradients_of(self.engine, self.stage) if self.optimizer is not None else []
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [state[moment] for state in states for moment in checkpoint.MOMENTS]
