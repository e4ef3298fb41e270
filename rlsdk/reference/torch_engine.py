"""`torch`: a TrainEngine in one process. A complete implementation of the contract, and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    Box,
    CheckpointError,
    ConfigError,
    ForwardBackwardResult,
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
    WeightPart,
    WeightShard,
    fingerprint,
)
from rlsdk.kit.files.atomic_files import atomic_write_json, atomic_write_tensors
from rlsdk.kit.files.export import ExportedTensor, in_dtype, write_model
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.model.adapter_files import initial_values, write_adapter
from rlsdk.kit.model.adapters import KeptReference, ModelAdapter, add_adapter, base_digest, check_base, count_moved
from rlsdk.kit.model.device_copies import to_host
from rlsdk.kit.model.divergence import load_teacher_head
from rlsdk.kit.model.hf import build_model, canonical_parameters, persistent_buffers
from rlsdk.kit.model.microbatch import check_limits, cut_passes, groups_to_keep, rows_that_belong_together
from rlsdk.kit.model.optim import build_optimizer, learning_rate, set_learning_rate
from rlsdk.kit.model.outputs import OutputModel, TeacherHead, empty_outputs
from rlsdk.kit.ranks.metric_sums import MetricSums
from rlsdk.kit.ranks.shared_memory import share
from rlsdk.system.files import read_regular

REFERENCE = "reference"
"""Key of the kept adapter's tensors in a checkpoint."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Names of AdamW's moments of one parameter."""
RANDOM = ("random", "random_cuda")
"""States of torch's generators in a checkpoint."""
CHECKPOINT_FORMAT = 1


class TorchTrainEngine(TrainEngine):
    """Trained weights, their gradients and `shards` are float32. With `ModelSpec.dtype` bfloat16 the model computes
    with a rounded copy: gradients of all micro-batches are accumulated in float32, and each optimizer step rounds the
    copy again, so no update is lost to bfloat16's short mantissa. A frozen model is stored in `ModelSpec.dtype`, also
    below an adapter, whose A and B are float32.

    All micro-batches add to the same gradients without averaging: the objective's weights are global.
    """

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        _check_spec(ctx, spec)
        self.ctx, self.spec = ctx, spec
        self.device = torch.device(ctx.device)
        frozen = spec.optim is None
        trains_all = not frozen and spec.model.adapter is None
        self.model = build_model(
            spec.model,
            device=self.device,
            dtype=torch.float32 if trains_all else None,
            seed=ctx.seed,
            init_from_config=spec.init_from_config,
        ).requires_grad_(trains_all)
        self.adapter = add_adapter(self.model, spec.model, trained=not frozen)
        if spec.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers recomputes in training mode only; `build_model` removed dropout
        self.outputs = OutputModel(self.model, spec.model.head)
        self.computed, self.tied = canonical_parameters(self.model)
        if self.adapter is None:
            self.parameters = self._split_precision() if trains_all else self.computed
        else:
            self.parameters = self._begin_adapter(self.adapter, ctx.seed)
        self.rounds = trains_all and self.parameters is not self.computed
        self.reference = None if self.adapter is None else KeptReference(self.adapter, self.parameters)
        self._base: str | None = None
        if trains_all and self.device.type == "cpu":
            for parameter, shared in zip(self.parameters.values(), share(list(self.parameters.values())), strict=True):
                parameter.data = shared
        self.optim: OptimSpec | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.num_steps = 0
        if spec.optim is not None:
            self.reset_optimizer(spec.optim)

    @property
    def parallel(self) -> Parallel:
        return Parallel()

    def forward_reference(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        assert self.reference is not None
        with self.reference.in_use():
            return self.forward(batch, outputs)

    def keep_reference(self) -> None:
        assert self.reference is not None
        self.reference.keep()

    def moved_share(self) -> float:
        assert self.adapter is not None
        adapted = [(n, w) for n, w in self.computed.items() if self.adapter.module_of(n) is not None]
        moved, numel = count_moved((weight, self._merged(name, weight)) for name, weight in adapted)
        return moved / numel

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = empty_outputs(self.model, batch, outputs)
        for rows in self._cut(batch):
            part, plan = self.outputs.send(batch.select(rows), self.device)
            for name, values in to_host(self.outputs(part, outputs, plan=plan)).items():
                found[name][rows if name == "scores" else batch.token_index(rows)] = values
        return found

    def load_teacher(self, spec: ModelSpec, number: int = 0) -> None:
        self.outputs.teachers[number] = TeacherHead(load_teacher_head(spec, self.device))

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """See `TrainEngine`. If the objective raises, the gradients accumulated so far are dropped."""
        optimizer, _ = self._trained()
        cut, metrics = self._cut(batch, objective), MetricSums()
        try:
            for rows in cut:
                part, plan = self.outputs.send(batch.select(rows), self.device)
                result = objective(self.outputs(part, objective.outputs, plan=plan), part)
                result.loss.backward()  # type: ignore[no-untyped-call]
                self._collect_gradients()
                metrics.add(result)
        except BaseException:
            self.model.zero_grad()
            optimizer.zero_grad()
            raise
        loss, sums, maxima = metrics.totals()
        return ForwardBackwardResult(loss=loss, sums=sums, maxima=maxima, num_micro_batches=len(cut))

    def optim_step(self) -> OptimStepResult:
        optimizer, spec = self._trained()
        lr = learning_rate(self.num_steps, spec)
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        limit = math.inf if spec.max_grad_norm is None else spec.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit)) if parameters else 0.0
        finite = math.isfinite(norm)
        if finite:
            set_learning_rate(optimizer, lr)
            optimizer.step()
            self._round_weights()
            self.num_steps += 1
        optimizer.zero_grad()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)

    def layout(self) -> WeightLayout:
        return self._layout_of(self._served(), self.tied)

    def shards(self) -> Iterator[WeightShard]:
        for name, tensor in self._served().items():
            yield WeightShard(name=name, box=Box.whole(tuple(tensor.shape)), tensor=self._merged(name, tensor))

    def part_layout(self, part: WeightPart) -> WeightLayout:
        return self._layout_of(self._part(part), self.tied if part is WeightPart.BASE else {})

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        for name, tensor in self._part(part).items():
            yield WeightShard(name=name, box=Box.whole(tuple(tensor.shape)), tensor=tensor.detach())

    def _part(self, part: WeightPart) -> Mapping[str, Tensor]:
        return self.parameters if part is WeightPart.ADAPTER else self._served()

    def _layout_of(self, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> WeightLayout:
        return WeightLayout(
            rank=0,
            node=self.ctx.node,
            device=self.ctx.device,
            process=f"{self.ctx.node}:{os.getpid()}",
            tensors=tuple(
                TensorMeta(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
                for name, p in tensors.items()
            ),
            boxes=tuple((name, Box.whole(tuple(p.shape))) for name, p in tensors.items()),
            tied=tied,
        )

    def _served(self) -> dict[str, Tensor]:
        """Tensors that a rollout engine needs, without the adapter."""
        return {**self._whole(), **persistent_buffers(self.model)}

    def _whole(self) -> Mapping[str, Tensor]:
        """The model's own weights: the trained ones, or those below an adapter."""
        return self.parameters if self.adapter is None else self.computed

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        """A weight of the model with its adapter, if it has one."""
        if self.adapter is None:
            return weight.detach()
        return self.adapter.merged(name, weight, self.parameters, self.parameters)

    def save_checkpoint(self, path: Path) -> None:
        """See `TrainEngine`. Gradients are not part of a checkpoint: save after `optim_step`."""
        tensors = {f"weight/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, state in self._moments():
            tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
        if self.reference is not None:
            tensors |= {f"{REFERENCE}/{name}": values for name, values in self.reference.values.items()}
        tensors[RANDOM[0]] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors[RANDOM[1]] = torch.cuda.get_rng_state(self.device)
        atomic_write_tensors(path / "state.safetensors", tensors)
        progress = {"format": CHECKPOINT_FORMAT, "num_steps": self.num_steps, "base": self._base_digest()}
        atomic_write_json(path / "state.json", progress)

    def load_checkpoint(self, path: Path) -> None:
        from safetensors.torch import load_file

        try:
            state = json.loads(read_regular(path / "state.json"))
            if state["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"it has format {state['format']!r}, expected {CHECKPOINT_FORMAT}")
            num_steps = int(state["num_steps"])
            tensors = load_file(path / "state.safetensors")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a whole checkpoint of backend 'torch': {error}") from error
        check_base(path, state.get("base"), self._base_digest())
        self._check_fit(path, tensors)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight/{name}"])
        self._round_weights()
        if self.optimizer is not None:
            self._load_moments(self.optimizer, tensors)
        if self.reference is not None:
            kept = {name: tensors.get(f"{REFERENCE}/{name}") for name in self.parameters}
            self.reference.values = {n: t.to(self.device, copy=True) for n, t in kept.items() if t is not None}
        self.num_steps = num_steps
        torch.set_rng_state(tensors[RANDOM[0]])
        if RANDOM[1] in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[RANDOM[1]], self.device)

    def save_pretrained(self, path: Path) -> None:
        """See `TrainEngine`. Needs memory for one or two tensors besides the model."""
        if self.adapter is not None and self.adapter.spec.export == "adapter":
            write_adapter(path, self.model, self.adapter, self.parameters, self.spec.model)
            return
        whole, buffers = self._whole(), persistent_buffers(self.model)
        shapes = {name: p.shape for name, p in whole.items()}
        tensors = in_dtype(shapes, getattr(torch, self.spec.model.dtype))
        tensors += [ExportedTensor(name=name, shape=tuple(b.shape), dtype=b.dtype) for name, b in buffers.items()]

        def fetch(tensor: ExportedTensor, _: int) -> Tensor:
            return buffers[tensor.name] if tensor.name in buffers else self._merged(tensor.name, whole[tensor.name])

        write_model(path, self.model.config, tensors, fetch, source=self.spec.model.path)

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        """Moves `parts` to the host. On `cpu` they are already there and stay."""
        self._move(parts, torch.device("cpu"))

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        self._move(parts, self.device)

    def reset_optimizer(self, optim: OptimSpec) -> None:
        learning_rate(0, optim)
        self.optim = optim
        self.num_steps = 0
        self.optimizer = build_optimizer(self.parameters.items(), optim)

    def close(self) -> None:
        vars(self).clear()  # models, optimizer and graphs go with their last reference

    def _trained(self) -> tuple[torch.optim.Optimizer, OptimSpec]:
        """Parts of a model that is trained."""
        assert self.optimizer is not None
        assert self.optim is not None
        return self.optimizer, self.optim

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        """Rows of each micro-batch."""
        if batch.num_rows == 0:
            return []
        groups, near = groups_to_keep(batch, objective), rows_that_belong_together(batch)
        return cut_passes(self.spec, batch.lengths, groups=groups, near=near)

    def _split_precision(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters: the model's own, or float32 masters of which the model's become a rounded copy."""
        dtype = getattr(torch, self.spec.model.dtype)
        if dtype is torch.float32:
            return self.computed
        trained = {name: torch.nn.Parameter(p.detach().clone()) for name, p in self.computed.items()}
        for parameter in self.computed.values():
            parameter.data = parameter.data.to(dtype)
        return trained

    @torch.no_grad()
    def _begin_adapter(self, adapter: ModelAdapter, seed: int) -> dict[str, torch.nn.Parameter]:
        """The trained parameters: A and B, with their first values."""
        parameters = adapter.parameters
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        for name, values in initial_values(adapter.spec, shapes, seed):
            parameters[name].copy_(values)
        return parameters

    def _base_digest(self) -> str | None:
        """Fingerprint of the frozen weights below an adapter."""
        if self._base is None and self.adapter is not None:
            found = {name: fingerprint(p, Box.whole(tuple(p.shape))) for name, p in self.computed.items()}
            self._base = base_digest(found, self.adapter.spec)
        return self._base

    def _collect_gradients(self) -> None:
        """Adds the gradients of the rounded copy to those of the float32 masters."""
        if not self.rounds:
            return
        for name, parameter in self.computed.items():
            if parameter.grad is not None:
                trained, gradient = self.parameters[name], parameter.grad.float()
                trained.grad = gradient if trained.grad is None else trained.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _round_weights(self) -> None:
        if self.rounds:
            for name, parameter in self.computed.items():
                parameter.copy_(self.parameters[name])

    def _moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Optimizer state by parameter name; parameters without any gradient so far have none."""
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                if state := self.optimizer.state.get(parameter):
                    yield name, cast("dict[str, Tensor]", state)

    def _load_moments(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        optimizer.zero_grad()
        optimizer.state.clear()
        for name, parameter in self.parameters.items():
            if f"{MOMENTS[0]}/{name}" in tensors:
                optimizer.state[parameter] = {
                    moment: tensors[f"{moment}/{name}"].to(self.device, copy=True) for moment in MOMENTS
                }

    def _check_fit(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        have = {
            name.removeprefix("weight/"): tuple(t.shape) for name, t in tensors.items() if name.startswith("weight/")
        }
        want = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        wrong = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        if wrong:
            name = wrong[0]
            raise CheckpointError(
                f"{path} was saved from another model: {len(wrong)} tensors differ, first {name!r} with shape "
                f"{have.get(name)} there and {want.get(name)} here; load it with the model that it was saved from"
            )
        for name in tensors:
            moment, _, parameter = name.partition("/")
            lacking = [m for m in MOMENTS if f"{m}/{parameter}" not in tensors] if moment in MOMENTS else []
            valid = ("weight", *MOMENTS, *RANDOM, *((REFERENCE,) if self.adapter is not None else ()))
            unknown = moment not in valid or (moment in (*MOMENTS, REFERENCE) and parameter not in want)
            if unknown or lacking:
                raise CheckpointError(
                    f"{path} is damaged: {name!r} is "
                    + (f"there without {lacking}" if lacking else "a name that this engine does not write")
                )
        if RANDOM[0] not in tensors:
            raise CheckpointError(f"{path} is damaged: it lacks {RANDOM[0]!r}")

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        for part in parts:
            for tensor in self._tensors_of(part):
                tensor.data = tensor.data.to(device)
        if device.type == "cpu" and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _tensors_of(self, part: str) -> list[Tensor]:
        if part == "weights":
            kept = [] if self.reference is None else self.reference.values.values()
            return [*self.parameters.values(), *self.computed.values(), *kept]
        if part == "gradients":
            return [p.grad for p in self.parameters.values() if p.grad is not None]
        return [state[moment] for _, state in self._moments() for moment in MOMENTS]


def _check_spec(ctx: RankContext, spec: TrainSpec) -> None:
    if ctx.world_size != 1:
        raise ConfigError(
            f"backend 'torch' runs in one process, but the {ctx.role} pool has {ctx.world_size} devices; "
            "set placement.devices_per_node to 1, or choose a data-parallel backend: pip install rlsdk-fsdp"
        )
    if spec.optim is not None and spec.model.dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"model.dtype {spec.model.dtype!r}: backend 'torch' trains in 'float32' or 'bfloat16'; float16 gradients "
            "underflow without loss scaling"
        )
    if spec.engine_kwargs:
        raise ConfigError(
            f"backend 'torch' has no constructor of its own to pass {sorted(spec.engine_kwargs)} to; leave "
            "engine_kwargs empty"
        )
    check_limits(spec)
