"""Log-probs of a model in float64: what float32 engines, transformers among them, are held against."""

from __future__ import annotations

from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import Batch
from rlsdk.testing.process.models import random_batch

NUM_ROWS = 11


@lru_cache(maxsize=8)
def log_probs(path: str, *, precise: bool) -> dict[int, Tensor]:
    """`[T]` float64 of each row of the batch that `worlds.drive` looks at, by its identity.

    Args:
        path: of a dense model.
        precise: computed in float64; else in float32, by transformers as it is.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if precise:
        _make_precise(model)
    batch: Batch = random_batch(NUM_ROWS, seed=3)
    rows = batch["input_ids"].split(batch.lengths.tolist())
    return {int(at): _of_row(model, row) for at, row in zip(batch["row_id"], rows, strict=True)}


def _of_row(model: Any, row: Tensor) -> Tensor:
    with torch.no_grad():
        logs = torch.log_softmax(model(row[None]).logits[0].double(), -1)
    return torch.cat([logs.new_zeros(1), logs[:-1].gather(1, row[1:, None])[:, 0]])


def _make_precise(model: Any) -> None:
    """Norms and positions are computed in float32 by transformers, whatever the weights are."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(_angles, module)


def _norm(self: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return normed * self.weight


def _angles(self: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    half = position_ids[..., None].double() * self.inv_freq
    angles = torch.cat((half, half), -1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def root_mean_square(found: dict[int, Tensor], truth: dict[int, Tensor]) -> float:
    """Of the error over the tokens that count."""
    errors = [(tensor.double() - truth[row])[tensor != 0] for row, tensor in found.items()]
    return float(torch.cat(errors).square().mean().sqrt())
