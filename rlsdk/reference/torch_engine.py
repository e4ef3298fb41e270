"""`torch`: a TrainEngine in one process. Every line of the contract, and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    Box,
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
from rlsdk.kit.atomic import atomic_write_json
from rlsdk.kit.hf import build_model, canonical_parameters, save_hf_folder
from rlsdk.kit.microbatch import micro_batches
from rlsdk.kit.optim import build_optimizer, learning_rate, set_learning_rate
from rlsdk.kit.outputs import OutputModel

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter."""


class TorchTrainEngine(TrainEngine):
    """Parameters are held in float32; with another `ModelSpec.dtype` the passes run under autocast to it, as mixed
    precision is commonly done. Every micro-batch adds to the same gradients, and nothing is averaged."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        if ctx.world_size != 1:
            raise ConfigError(
                f"backend 'torch' runs in one process, but the {ctx.role} pool has {ctx.world_size} devices; "
                "set placement.devices_per_node to 1, or choose a data-parallel backend: pip install rlsdk-fsdp"
            )
        self.ctx, self.spec = ctx, spec
        self.device = torch.device(ctx.device)
        self.model = build_model(
            spec.model,
            device=self.device,
            dtype=torch.float32,
            seed=ctx.seed,
            init_from_config=spec.init_from_config,
        )
        if spec.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers recomputes in training mode only; models of RL have no dropout
        self.outputs = OutputModel(self.model, spec.model.head)
        self.parameters, self.tied = canonical_parameters(self.model)
        self.num_steps = 0
        self.optim: OptimSpec | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optim is None:
            self.model.requires_grad_(False)
        else:
            self.reset_optimizer(spec.optim)

    @property
    def parallel(self) -> Parallel:
        return Parallel()

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = {name: torch.zeros(batch.num_rows if name == "scores" else batch.num_tokens) for name in outputs}
        for rows in self._cut(batch):
            for name, values in self._run(batch.select(rows).to(self.device), outputs).items():
                found[name][rows if name == "scores" else batch.token_index(rows)] = values.cpu()
        return found

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self._trained()
        loss, sums, maxima = 0.0, dict[str, float](), dict[str, float]()
        cut = self._cut(batch)
        for rows in cut:
            part = batch.select(rows).to(self.device)
            result = objective(self._run(part, objective.outputs), part)
            result.loss.backward()  # type: ignore[no-untyped-call]
            loss += float(result.loss.detach())
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in result.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), float(value))
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
            self.num_steps += 1
        optimizer.zero_grad()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)

    def layout(self) -> WeightLayout:
        return WeightLayout(
            rank=0,
            node=self.ctx.node,
            device=self.ctx.device,
            process=f"{self.ctx.node}:{os.getpid()}",
            tensors=tuple(
                TensorMeta(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
                for name, p in self.parameters.items()
            ),
            boxes=tuple((name, Box.whole(tuple(p.shape))) for name, p in self.parameters.items()),
            tied=self.tied,
        )

    def shards(self) -> Iterator[WeightShard]:
        for name, parameter in self.parameters.items():
            yield WeightShard(name=name, box=Box.whole(tuple(parameter.shape)), tensor=parameter.detach())

    def save_checkpoint(self, path: Path) -> None:
        from safetensors.torch import save_file

        tensors = {f"weight/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, state in self._moments():
            tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
        tensors["random"] = torch.get_rng_state()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "state.safetensors")
        atomic_write_json(path / "state.json", {"format": 1, "num_steps": self.num_steps})

    def load_checkpoint(self, path: Path) -> None:
        from safetensors.torch import load_file

        try:
            tensors = load_file(path / "state.safetensors", device=str(self.device))
            num_steps = int(json.loads((path / "state.json").read_text())["num_steps"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is not a whole checkpoint of backend 'torch': {error}") from error
        self._check_fit(path, tensors)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight/{name}"])
        if self.optimizer is not None:
            self._load_moments(tensors)
        self.num_steps = num_steps
        torch.set_rng_state(tensors["random"].cpu())

    def save_pretrained(self, path: Path) -> None:
        dtype = getattr(torch, self.spec.model.dtype)
        named = ((name, parameter.detach().to(dtype).cpu()) for name, parameter in self.parameters.items())
        save_hf_folder(path, self.model.config, named)

    def offload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        self._move(parts, torch.device("cpu"))

    def onload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        self._move(parts, self.device)

    def reset_optimizer(self, optim: object) -> None:
        self.optim = cast(OptimSpec, optim)
        learning_rate(0, self.optim)
        self.num_steps = 0
        self.optimizer = build_optimizer(self.parameters.items(), self.optim)

    def _trained(self) -> tuple[torch.optim.Optimizer, OptimSpec]:
        if self.optimizer is None or self.optim is None:
            raise ConfigError(f"the model of role {self.ctx.role!r} is frozen: it was built without an OptimSpec")
        return self.optimizer, self.optim

    def _cut(self, batch: Batch) -> list[Tensor]:
        """Rows of each micro-batch."""
        if batch.num_rows == 0:
            return []
        return micro_batches(
            batch.lengths, max_tokens=self.spec.micro_batch_tokens, max_rows=self.spec.micro_batch_rows
        )

    def _run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        with self._autocast():
            found: dict[str, Tensor] = self.outputs(batch, names)
        return found

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = getattr(torch, self.spec.model.dtype)
        return nullcontext() if dtype is torch.float32 else torch.autocast(self.device.type, dtype)

    def _moments(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Optimizer state by parameter name; parameters that never had a gradient have none."""
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                if state := self.optimizer.state.get(parameter):
                    yield name, state

    def _load_moments(self, tensors: Mapping[str, Tensor]) -> None:
        optimizer, _ = self._trained()
        optimizer.state.clear()
        for name, parameter in self.parameters.items():
            if f"{MOMENTS[0]}/{name}" in tensors:
                optimizer.state[parameter] = {moment: tensors[f"{moment}/{name}"].clone() for moment in MOMENTS}

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
                f"{have.get(name)} there and {want.get(name)} here"
            )

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        for parameter in self.parameters.values():
            if "weights" in parts:
                parameter.data = parameter.data.to(device)
            if "gradients" in parts and parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer and "optimizer" in parts else {}
            for moment in MOMENTS:
                if moment in state:
                    state[moment] = state[moment].to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()
