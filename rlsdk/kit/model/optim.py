"""AdamW and its learning-rate schedule, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from rlsdk.interfaces import ConfigError, OptimSpec, nearest

SCHEDULES = ("constant", "linear", "cosine")


def build_optimizer(named_parameters: Iterable[tuple[str, torch.nn.Parameter]], spec: OptimSpec) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019, arXiv 1711.05101), with weight decay only on parameters of two or more
    dimensions.

    Frozen parameters are excluded. One fused kernel per step, on CPU too.
    """
    parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    return adamw([p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2], spec)


def adamw(
    decayed: Sequence[torch.nn.Parameter], plain: Sequence[torch.nn.Parameter], spec: OptimSpec
) -> torch.optim.AdamW:
    """As `build_optimizer`, of parameters that the caller has split: those with weight decay, and those without."""
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True
    )


def learning_rate(step: int, spec: OptimSpec) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then the schedule over the rest of
    `total_steps`.

    Raises:
        ConfigError: an unknown schedule, or one that decays and has no `total_steps`.
    """
    if spec.schedule not in SCHEDULES:
        raise ConfigError(
            f"optim.schedule {spec.schedule!r}{nearest(spec.schedule, SCHEDULES)}: expected one of {list(SCHEDULES)}"
        )
    if spec.schedule != "constant" and spec.total_steps is None:
        raise ConfigError(f"optim.schedule {spec.schedule!r} decays over optim.total_steps, which is None: set it")
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant" or spec.total_steps is None:
        return spec.lr
    span = max(spec.total_steps - spec.warmup_steps, 1)
    done = min((step - spec.warmup_steps) / span, 1.0)
    left = 1.0 - done if spec.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
