"""`fsdp`: a TrainEngine on torch FSDP2."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlsdk.interfaces import (
    Batch,
    CheckpointError,
    ConfigError,
    ForwardBackwardResult,
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
from rlsdk.kit.hf import build_model, canonical_parameters, save_hf_folder
from rlsdk.kit.microbatch import micro_batches
from rlsdk.kit.optim import build_optimizer, learning_rate, set_learning_rate
from rlsdk.kit.outputs import OutputModel
from rlsdk.kit.rendezvous import destroy_process_group, init_process_group
from rlsdk_fsdp.checkpoint import Part, SavedShards, write_rank
from rlsdk_fsdp.config import FsdpOptions
from rlsdk_fsdp.loading import load_weights
from rlsdk_fsdp.shards import box_of, fill, held, local

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class FsdpTrainEngine(TrainEngine):
    """Weights are held in float32 shards on dimension 0; with `ModelSpec.dtype` bfloat16 the passes run in it and
    gradients are reduced in float32. Every rank is a data-parallel rank, replicas of hybrid sharding too.

    All ranks run the same number of micro-batches: a rank with fewer runs a token without weight in place of one.
    """

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.options = spec.options if isinstance(spec.options, FsdpOptions) else FsdpOptions()
        self.device = torch.device(ctx.device)
        self._check_sizes()
        init_process_group(ctx, "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
        self.model = build_model(spec.model, empty=True, dtype=torch.float32)
        if spec.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers recomputes in training mode only; models of RL have no dropout
        self.outputs = OutputModel(self.model, spec.model.head)
        self._shard()
        named, tied = canonical_parameters(self.outputs)
        self.parameters = {name.removeprefix("model."): p for name, p in named.items()}
        self.tied = {a.removeprefix("model."): b.removeprefix("model.") for a, b in tied.items()}
        load_weights(self.model, self.parameters, spec.model, seed=ctx.seed, random=spec.init_from_config)
        self.num_steps = 0
        self.optim: OptimSpec | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optim is None:
            self.outputs.requires_grad_(False)
        else:
            self.reset_optimizer(spec.optim)

    @property
    def parallel(self) -> Parallel:
        return Parallel(dp_rank=self.ctx.rank, dp_size=self.ctx.world_size)

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = {name: torch.zeros(batch.num_rows if name == "scores" else batch.num_tokens) for name in outputs}
        for rows in self._cut(batch):
            values = self._run(batch, rows, outputs)
            if len(rows):
                for name, value in values.items():
                    found[name][rows if name == "scores" else batch.token_index(rows)] = value.cpu()
        return found

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self._trained()
        loss, sums, maxima = 0.0, dict[str, float](), dict[str, float]()
        cut = self._cut(batch)
        for at, rows in enumerate(cut):
            self.outputs.set_requires_gradient_sync(at == len(cut) - 1)  # type: ignore[operator]
            values = self._run(batch, rows, objective.outputs)
            if not len(rows):
                (sum(value.sum() for value in values.values()) * 0.0).backward()  # type: ignore[union-attr]
                continue
            result = objective(values, batch.select(rows).to(self.device))
            # FSDP averages over ranks; the contract is the sum.
            (result.loss * self.ctx.world_size).backward()  # type: ignore[no-untyped-call]
            loss += float(result.loss.detach())
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in result.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), float(value))
        return self._add_up(loss, sums, maxima, len(cut))

    def optim_step(self) -> OptimStepResult:
        optimizer, spec = self._trained()
        lr = learning_rate(self.num_steps, spec)
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        limit = math.inf if spec.max_grad_norm is None else spec.max_grad_norm
        found = torch.nn.utils.clip_grad_norm_(parameters, limit) if parameters else torch.zeros(())
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        finite = math.isfinite(norm)
        if finite:
            set_learning_rate(optimizer, lr)
            optimizer.step()
            self.num_steps += 1
        optimizer.zero_grad()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)

    def layout(self) -> WeightLayout:
        return WeightLayout(
            rank=self.ctx.rank,
            node=self.ctx.node,
            device=self.ctx.device,
            process=f"{self.ctx.node}:{os.getpid()}",
            tensors=tuple(
                TensorMeta(name=name, shape=tuple(p.shape), dtype="float32") for name, p in self.parameters.items()
            ),
            boxes=tuple((name, box) for name, box, _ in held(self.parameters)),
            tied=self.tied,
        )

    def shards(self) -> Iterator[WeightShard]:
        for name, box, tensor in held(self.parameters):
            yield WeightShard(name=name, box=box, tensor=tensor)

    def save_checkpoint(self, path: Path) -> None:
        is_first_replica = self.ctx.rank < self.ctx.world_size // self.options.replicate_size
        parts = (self._part(name, p) for name, p in self.parameters.items() if is_first_replica and box_of(p).numel)
        extra = {"num_steps": self.num_steps, "world_size": self.ctx.world_size}
        write_rank(path, self.ctx.rank, parts, extra, torch.get_rng_state())
        dist.barrier()

    def load_checkpoint(self, path: Path) -> None:
        saved = SavedShards(path)
        self._check_fit(path, saved)
        for name, parameter in self.parameters.items():
            box = box_of(parameter)
            if box.numel:
                fill(parameter, cast(Tensor, saved.read("weight", name, box)))
        if self.optimizer is not None:
            self.optimizer.state.clear()
            for name, parameter in self.parameters.items():
                self._load_moments(saved, name, parameter)
        self.num_steps = int(saved.extra["num_steps"])
        if (random := saved.random(self.ctx.rank)) is not None:
            torch.set_rng_state(random)
        dist.barrier()

    def save_pretrained(self, path: Path) -> None:
        dtype = getattr(torch, self.spec.model.dtype)
        named = ((name, self._gathered(p).to(dtype).cpu()) for name, p in self.parameters.items())
        if self.ctx.rank == 0:
            save_hf_folder(path, self.model.config, named)
        else:
            for _ in named:
                pass
        dist.barrier()

    def offload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        self._move(parts, torch.device("cpu"))

    def onload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        self._move(parts, self.device)

    def reset_optimizer(self, optim: object) -> None:
        self.optim = cast(OptimSpec, optim)
        learning_rate(0, self.optim)
        self.num_steps = 0
        self.optimizer = build_optimizer(self.parameters.items(), self.optim)

    def close(self) -> None:
        destroy_process_group(self.ctx)

    def _check_sizes(self) -> None:
        world, copies = self.ctx.world_size, self.options.replicate_size
        if copies < 1 or world % copies:
            valid = [n for n in range(1, world + 1) if world % n == 0]
            raise ConfigError(
                f"train.fsdp.replicate_size: {copies} does not divide the {world} ranks of {self.ctx.role!r}; "
                f"expected one of {valid}"
            )

    def _mesh(self) -> DeviceMesh:
        copies = self.options.replicate_size
        if copies == 1:
            return init_device_mesh(self.device.type, (self.ctx.world_size,), mesh_dim_names=("shard",))
        shape = (copies, self.ctx.world_size // copies)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def _shard(self) -> None:
        """Cuts every layer, then what is left (embeddings, last norm, head) as one group."""
        dtype = getattr(torch, self.spec.model.dtype)
        policy = MixedPrecisionPolicy()
        if dtype is not torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if self.options.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        settings: dict[str, Any] = {
            "mesh": self._mesh(),
            "mp_policy": policy,
            "offload_policy": offload,
            "reshard_after_forward": self.options.reshard_after_forward,
        }
        layers = set(self.model._no_split_modules or ())
        for module in list(self.model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, **settings)
        fully_shard(self.outputs, **settings)
        self.outputs.to_empty(device="cpu" if self.options.cpu_offload else self.device)

    def _trained(self) -> tuple[torch.optim.Optimizer, OptimSpec]:
        if self.optimizer is None or self.optim is None:
            raise ConfigError(f"the model of role {self.ctx.role!r} is frozen: it was built without an OptimSpec")
        return self.optimizer, self.optim

    def _cut(self, batch: Batch) -> list[Tensor]:
        """Rows of each micro-batch; as many on every rank, at least one."""
        limits: dict[str, Any] = {"max_tokens": self.spec.micro_batch_tokens, "max_rows": self.spec.micro_batch_rows}
        mine = micro_batches(batch.lengths, **limits)
        most = torch.tensor(max(len(mine), 1))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return mine if len(mine) == int(most) else micro_batches(batch.lengths, **limits, min_count=int(most))

    def _run(self, batch: Batch, rows: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Outputs of these rows, or of a stand-in of two tokens where there are none."""
        part = batch.select(rows) if len(rows) else Batch.from_rows([[0, 0]])
        found: dict[str, Tensor] = self.outputs(part.to(self.device), names)
        return found

    def _add_up(
        self, loss: float, sums: Mapping[str, float], maxima: Mapping[str, float], count: int
    ) -> ForwardBackwardResult:
        """Joins what ranks found; one without rows knows no metric's name."""
        found: list[Any] = [None] * self.ctx.world_size
        dist.all_gather_object(found, (loss, dict(sums), dict(maxima)))
        names = dict.fromkeys(name for _, s, _ in found for name in s)
        tops = dict.fromkeys(name for _, _, m in found for name in m)
        return ForwardBackwardResult(
            loss=sum(part for part, _, _ in found),
            sums={name: sum(s.get(name, 0.0) for _, s, _ in found) for name in names},
            maxima={name: max(m.get(name, -math.inf) for _, _, m in found) for name in tops},
            num_micro_batches=count,
        )

    def _part(self, name: str, parameter: nn.Parameter) -> Part:
        state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
        moments = {kind: local(state[kind]) for kind in MOMENTS if kind in state}
        return Part(name, box_of(parameter), {"weight": local(parameter.detach()), **moments})

    def _load_moments(self, saved: SavedShards, name: str, parameter: nn.Parameter) -> None:
        optimizer, _ = self._trained()
        box = box_of(parameter)
        if (step := saved.read("step", name, box)) is None:
            return
        state: dict[str, Tensor] = {"step": step.clone()}
        for kind in MOMENTS[:2]:
            state[kind] = torch.zeros_like(parameter)
            values = saved.read(kind, name, box) if box.numel else None
            if values is not None:
                fill(state[kind], values)
        optimizer.state[parameter] = state

    def _check_fit(self, path: Path, saved: SavedShards) -> None:
        wrong = sorted(saved.names ^ set(self.parameters))
        if wrong:
            raise CheckpointError(f"{path} was saved from another model: {len(wrong)} names differ, first {wrong[0]!r}")

    def _gathered(self, parameter: Tensor) -> Tensor:
        whole = parameter.detach()
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        if self.device.type == "cpu" or self.options.cpu_offload:
            return
        for parameter in self.parameters.values():
            if "weights" in parts:
                local(parameter.data).data = local(parameter.data).to(device)
            if "gradients" in parts and parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer and "optimizer" in parts else {}
            for kind in MOMENTS[:2]:
                if kind in state:
                    state[kind] = state[kind].to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()
