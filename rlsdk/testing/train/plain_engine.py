"""The reference train engine in plain torch: transformers and AdamW, one rank, one pass. Slow and as direct as
possible."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlsdk.interfaces import (
    Batch,
    Box,
    CheckpointError,
    ForwardBackwardResult,
    Head,
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
from rlsdk.kit.model.hf import canonical_parameters, canonical_tensors
from rlsdk.testing.train.cases import Case
from rlsdk.testing.train.plain_steps import number, plain_model_of, scheduled

LARGEST_NORM = 1e15
"""Largest gradient norm whose sum of squares fits in float32 in any order; larger ones count as not finite."""
MOST_CHECKPOINTS = 16

CHECKPOINTS: dict[str, dict[str, Any]] = {}
"""Path -> state that plain engines of this process saved there; only the newest few. No files are written."""


class PlainTrainEngine(TrainEngine):
    """Runs a case in float32 whose weights come from a checkpoint."""

    def __init__(self, case: Case) -> None:
        self.case, self.head = case, case.head
        self.model: Any = plain_model_of(case)
        self.parameters: Mapping[str, Tensor] = canonical_parameters(self.model)[0]
        self.num_steps = 0
        self.optimizer: Any = None
        self.optim = case.optim
        if case.optim is not None:
            self._begin(case.optim)

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        """Does nothing."""

    @property
    def parallel(self) -> Parallel:
        return Parallel()

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = padded_numbers(self.model, self.head, batch)
        return {name: found[name] for name in outputs}

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if batch.num_rows == 0:
            return ForwardBackwardResult(loss=0.0)
        try:
            with torch.enable_grad():
                found = padded_numbers(self.model, self.head, batch)
                result = objective({name: found[name] for name in objective.outputs}, batch)
                result.loss.backward()  # type: ignore[no-untyped-call]
        except Exception:
            self.model.zero_grad()
            raise
        return ForwardBackwardResult(
            loss=float(result.loss.detach()),
            sums={name: number(value) for name, value in result.sums.items()},
            maxima={name: number(value) for name, value in result.maxima.items()},
        )

    def optim_step(self) -> OptimStepResult:
        assert self.optim is not None
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in gradients])))
        rate = scheduled(self.num_steps, self.optim)
        skipped = not math.isfinite(norm) or norm > LARGEST_NORM
        if not skipped:
            if self.optim.max_grad_norm is not None and norm > self.optim.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(self.optim.max_grad_norm / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.num_steps += 1
        self.model.zero_grad()
        return OptimStepResult(grad_norm=norm, lr=rate, skipped=skipped)

    def layout(self) -> WeightLayout:
        tensors = tuple(TensorMeta(name=n, shape=tuple(t.shape), dtype="float32") for n, t in self.tensors().items())
        boxes = tuple((meta.name, Box.whole(meta.shape)) for meta in tensors)
        return WeightLayout(rank=0, node="localhost", process="localhost:0", device="cpu", tensors=tensors, boxes=boxes)

    def shards(self) -> Iterator[WeightShard]:
        for name, tensor in self.tensors().items():
            yield WeightShard(name=name, box=Box.whole(tuple(tensor.shape)), tensor=tensor.detach())

    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers."""
        return canonical_tensors(self.model)[0]

    def save_checkpoint(self, path: Path) -> None:
        state = {
            "weights": {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()) if self.optimizer is not None else None,
            "steps": self.num_steps,
        }
        CHECKPOINTS.pop(str(path), None)
        CHECKPOINTS[str(path)] = state
        while len(CHECKPOINTS) > MOST_CHECKPOINTS:
            del CHECKPOINTS[next(iter(CHECKPOINTS))]

    def load_checkpoint(self, path: Path) -> None:
        """Only what a plain engine of this process saved can be loaded."""
        if (state := CHECKPOINTS.get(str(path))) is None:
            raise CheckpointError(f"{path} has no checkpoint of this process")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["weights"][name])
        self.model.zero_grad()
        if self.optimizer is not None and state["optimizer"] is not None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            # Settings come from the specification, not from the file.
            for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(settings)
            self.num_steps = state["steps"]

    def save_pretrained(self, path: Path) -> None:
        """Writes nothing."""

    def offload(self, parts: Sequence[str] = ()) -> None:
        """Moves nothing."""

    def onload(self, parts: Sequence[str] = ()) -> None:
        """Moves nothing."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        self._begin(optim)

    def _begin(self, optim: OptimSpec) -> None:
        self.optim, self.num_steps = optim, 0
        self.model.zero_grad()
        values = self.parameters.values()
        groups = [
            {"params": [p for p in values if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in values if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False, fused=False
        )


def padded_numbers(model: Any, head: Head, batch: Batch) -> dict[str, Tensor]:
    """Every output of the head, for all rows in one pass, padded at their ends; differentiable. 0 outside the mask, if
    there is one. Tokens do not attend to later ones, so padding changes no output."""
    if batch.num_rows == 0:
        names = ("log_probs", "entropy") if head is Head.LM else ("values", "scores")
        return {name: torch.zeros(0) for name in names}
    rows = torch.split(batch["input_ids"], batch.lengths.tolist())
    ids = pad_sequence(list(rows), batch_first=True)
    logits = model(ids).logits.float()
    here = torch.arange(ids.shape[1]) < batch.lengths[:, None]
    start = logits.new_zeros(len(ids), 1)
    if head is not Head.LM:
        numbers = logits[..., 0]
        values = torch.cat([start, numbers[:, :-1]], dim=1)
        return {"values": values[here], "scores": numbers[torch.arange(len(ids)), batch.lengths - 1]}
    logs = (logits[:, :-1] / batch.temperature).log_softmax(-1)
    taken = logs.gather(2, ids[:, 1:, None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    found = {"log_probs": torch.cat([start, taken], dim=1)[here], "entropy": torch.cat([start, entropy], dim=1)[here]}
    mask = batch.tokens.get("response_mask")
    return found if mask is None else {name: values * mask for name, values in found.items()}
