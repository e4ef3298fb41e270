"""AdamW and its learning-rate schedule, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from rlsdk.interfaces import ConfigError, OptimSpec


def build_optimizer(named_parameters: Iterable[tuple[str, torch.nn.Parameter]], spec: OptimSpec) -> torch.optim.AdamW:
    """AdamW; weight decay on parameters of two or more dimensions only."""
    parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True
    )


def learning_rate(step: int, spec: OptimSpec) -> float:
    """Of optimizer step `step` (0-based): linear warm-up, then the schedule over what is left of `total_steps`.

    Raises:
        ConfigError: a schedule that decays, without `total_steps`; or an unknown schedule.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    if spec.total_steps is None:
        raise ConfigError(f"schedule {spec.schedule!r} needs total_steps, which is None")
    span = max(spec.total_steps - spec.warmup_steps, 1)
    done = min((step - spec.warmup_steps) / span, 1.0)
    if spec.schedule == "linear":
        return spec.lr * (1.0 - done)
    if spec.schedule == "cosine":
        return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)
    raise ConfigError(f"schedule {spec.schedule!r}: expected 'constant', 'linear' or 'cosine'")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
