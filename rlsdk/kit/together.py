"""Agreement between ranks: errors on one rank raise on all, and metrics sum to the same result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import CheckpointError, ForwardBackwardResult, ObjectiveResult, RlsdkError

Metric = Tensor | float


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Every rank enters. What fails on one is a `CheckpointError` on all, so that nobody waits for a rank that gave up.

    The body must hold no collective.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if cause is None else f"{type(cause).__name__}: {cause}")
    if any(problems):
        if isinstance(cause, CheckpointError):
            raise cause
        messages = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
        raise CheckpointError(f"{what}: {messages}") from cause


def raise_together(failures: Sequence[Exception]) -> None:
    """Every rank enters after its passes, with what an objective raised there. Where one failed all raise: that one
    its own error, the others an `RlsdkError` that names it."""
    mine = f"{type(failures[0]).__name__}: {failures[0]}" if failures else None
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, mine)
    if failures:
        raise failures[0]
    if found := [(rank, text) for rank, text in enumerate(messages) if text]:
        raise RlsdkError(f"the objective failed on rank {found[0][0]}: {found[0][1]}")


class Tally:
    """Loss and metrics of one mini-batch, read from the device once."""

    def __init__(self) -> None:
        self._loss: Metric = 0.0
        self._sums: dict[str, Metric] = {}
        self._maxima: dict[str, Metric] = {}

    def add(self, result: ObjectiveResult) -> None:
        self._loss = self._loss + _wide(result.loss)
        for name, value in result.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + _wide(value)
        for name, value in result.maxima.items():
            wide, before = _wide(value), self._maxima.get(name)
            self._maxima[name] = wide if before is None else torch.maximum(_tensor(wide), _tensor(before))

    def join(self, num_micro_batches: int) -> ForwardBackwardResult:
        """Adds up over ranks; one without rows knows no metric's name. Every rank must call."""
        mine = (
            float(self._loss),
            {name: float(value) for name, value in self._sums.items()},
            {name: float(value) for name, value in self._maxima.items()},
        )
        found = [mine] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        names = dict.fromkeys(name for _, sums, _ in found for name in sums)
        tops = dict.fromkeys(name for _, _, maxima in found for name in maxima)
        return ForwardBackwardResult(
            loss=math.fsum(loss for loss, _, _ in found),
            sums={name: math.fsum(sums.get(name, 0.0) for _, sums, _ in found) for name in names},
            maxima={name: max(maxima[name] for _, _, maxima in found if name in maxima) for name in tops},
            num_micro_batches=num_micro_batches,
        )


def _wide(value: Metric) -> Metric:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _tensor(value: Metric) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
