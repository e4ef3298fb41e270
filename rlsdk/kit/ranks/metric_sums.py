"""Sums loss and metrics over micro-batches and ranks, to the same result on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import ForwardBackwardResult, ObjectiveResult

Metric = Tensor | float


class MetricSums:
    """Loss and metrics of one mini-batch. They stay on the device until `reduce`, which synchronizes with it once."""

    def __init__(self) -> None:
        self._loss: Metric = 0.0
        self._sums: dict[str, Metric] = {}
        self._maxima: dict[str, Metric] = {}

    def add(self, result: ObjectiveResult) -> None:
        """Adds the results of one micro-batch, in float64."""
        self._loss = self._loss + _wide(result.loss)
        for name, value in result.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + _wide(value)
        for name, value in result.maxima.items():
            wide, before = _wide(value), self._maxima.get(name)
            self._maxima[name] = wide if before is None else torch.maximum(_tensor(wide), _tensor(before))

    def totals(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """(loss, sums, maxima) of this rank. Waits once for each device that they are on."""
        values = _numbers([self._loss, *self._sums.values(), *self._maxima.values()])
        sums = dict(zip(self._sums, values[1:], strict=False))
        return values[0], sums, dict(zip(self._maxima, values[1 + len(sums) :], strict=True))

    def reduce(self, num_micro_batches: int, *, counts: bool = True) -> ForwardBackwardResult:
        """Reduces over ranks: sums of loss and `sums`, maxima of `maxima`. Collective: every rank must call.

        A rank without rows has no metrics; the result has the names of all ranks.

        Args:
            num_micro_batches: of this rank, copied into the result.
            counts: False for a rank whose rows another one has, too: only one of them counts.
        """
        mine = self.totals() if counts else (0.0, {}, {})
        per_rank = [mine] * dist.get_world_size()
        dist.all_gather_object(per_rank, mine)
        names = dict.fromkeys(name for _, sums, _ in per_rank for name in sums)
        tops = dict.fromkeys(name for _, _, maxima in per_rank for name in maxima)
        return ForwardBackwardResult(
            loss=math.fsum(loss for loss, _, _ in per_rank),
            sums={name: math.fsum(sums.get(name, 0.0) for _, sums, _ in per_rank) for name in names},
            maxima={name: max(maxima[name] for _, _, maxima in per_rank if name in maxima) for name in tops},
            num_micro_batches=num_micro_batches,
        )


def _numbers(values: Sequence[Metric]) -> list[float]:
    """Metrics as Python numbers, by one copy from the device."""
    tensors = {at: value for at, value in enumerate(values) if isinstance(value, Tensor)}
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        return [float(value) for value in values]
    read = torch.stack([tensor.double() for tensor in tensors.values()]).tolist() if tensors else []
    return [float(value) for value in ({**dict(enumerate(values)), **dict(zip(tensors, read, strict=True))}).values()]


def _wide(value: Metric) -> Metric:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _tensor(value: Metric) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
