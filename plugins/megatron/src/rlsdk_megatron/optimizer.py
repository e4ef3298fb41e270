"""Access to the state of a parameter in Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlsdk.interfaces import OptimSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, with the shape of a parameter; it also counts steps."""


@dataclass(frozen=True)
class Slot:
    """This rank's part of one parameter in the optimizer: a range of its flattened elements."""

    main: Tensor
    """The float32 master weights; the parameter's own memory if it is float32 too."""
    start: int
    stop: int
    inner: Any
    """The torch optimizer (or one with its interface) that updates this slot."""

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments; empty before the first step."""
        state = self.inner.state.get(self.main) or {}
        return {name: state[name] for name in MOMENTS if name in state}

    def set_moments(self, moments: dict[str, Tensor], num_steps: int) -> None:
        """Replaces the state; `num_steps` 0: no state yet."""
        self.inner.state.pop(self.main, None)
        if num_steps:
            self.inner.state[self.main] = dict(moments)
            for group in self.inner.param_groups:
                if "step" in group:  # fused kernels have one step count per group
                    group["step"] = num_steps
            if not any("step" in group for group in self.inner.param_groups):
                self.inner.state[self.main]["step"] = torch.tensor(float(num_steps))


def slot_of(optimizer: Any, parameter: Tensor) -> Slot | None:
    """The slot of a parameter; None if other data-parallel ranks have all of it."""
    for one in optimizers(optimizer):
        if not hasattr(one, "model_param_group_index_map"):
            main = getattr(parameter, "main_param", parameter)
            if any(main is p for group in one.optimizer.param_groups for p in group["params"]):
                return Slot(main, 0, main.numel(), one.optimizer)
        elif parameter in one.model_param_group_index_map:
            group, order = one.model_param_group_index_map[parameter]
            place = one._get_model_param_range_map(parameter)["param"]
            return Slot(one.optimizer.param_groups[group]["params"][order], place.start, place.end, one.optimizer)
    return None


def optimizers(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers: one for experts and one for the rest; those without a parameter on this rank are left
    out."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.get_parameters():
            yield one


def replicas(parameter: Tensor) -> Any:
    """The group of ranks with the same values of a parameter, which may share its optimizer state."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def collect(parameter: Tensor, slot: Slot | None, values: Tensor | None, *, shared: bool) -> Tensor:
    """Gathers a parameter's whole state on the first of its replicas; the result on others is meaningless.

    Args:
        parameter: the result has its shape.
        slot: this rank's range of it.
        values: values of this range.
        shared: each replica has only a range instead of everything. All replicas must then call.
    """
    whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    if slot is not None and values is not None:
        whole.view(-1)[slot.start : slot.stop] = values.detach().view(-1)
    group = replicas(parameter)
    if shared and dist.get_world_size(group) > 1:
        dist.reduce(whole, dist.get_global_rank(group, 0), group=group)
    return whole


def settings_of(optim: OptimSpec) -> dict[str, Any]:
    """Fields of Megatron's optimizer configuration. The engine clips, as it checks the norm first."""
    return {
        "optimizer": "adam",
        "lr": optim.lr,
        "min_lr": 0.0,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "clip_grad": 0.0,
    }
