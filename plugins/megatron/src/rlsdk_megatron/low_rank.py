"""Low-rank adapters beside Megatron's tensor-parallel linear layers.

What crosses ranks has the width of the ranks of the adapters, not that of hidden states: beside a column-parallel layer
every rank has each A whole and its rows of B, beside a row-parallel one its columns of A and each B whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from rlsdk_megatron.adapter_parts import LowParts


class LowRank(nn.Module):
    """The adapters of all canonical layers that one of Megatron's linear modules joins; A and B are float32."""

    def __init__(self, linear: Any, lows: Sequence[LowParts], scale: float, device: torch.device) -> None:
        """Does not change `linear`: `attach` does.

        Args:
            linear: a column- or row-parallel linear module.
            lows: the adapters, in the order of their canonical layers; on every rank as many.
            scale: factor of `B A x`.
            device: of the parameters, which have no values yet.
        """
        super().__init__()
        self.lows, self.scale = lows, scale
        self.rank = lows[0].a.box.size[0]
        self.by_rows = isinstance(linear, RowParallelLinear)
        self.sequence_parallel = bool(linear.config.sequence_parallel)
        self.num_features = len(linear.weight)
        self.enabled = True
        # Parameters of this module itself, not of one inside: hooks of overlapped gathers wait for these.
        for at, low in enumerate(lows):
            self._add(f"a{at}", low.a.box.size, device, split_dim=1 if self.by_rows else None)
            if low.b is not None:
                self._add(f"b{at}", low.b.box.size, device, split_dim=None if self.by_rows else 0)

    def _add(self, name: str, shape: Sequence[int], device: torch.device, *, split_dim: int | None) -> None:
        parameter = nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))
        split = split_dim is not None
        # Gradient norms count the copies of a whole one once; those of each rank's positions are summed.
        set_tensor_model_parallel_attributes(parameter, split, -1 if split_dim is None else split_dim, 1)
        parameter.sequence_parallel = self.sequence_parallel and not split  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def attach(self, linear: nn.Module) -> None:
        """From now on `linear` computes with the adapters, unless `enabled` is false."""
        linear.adapter = self
        linear.register_forward_hook(_add_adapter)

    def forward(self, states: Tensor, found: Tensor) -> Tensor:
        """`found + scale * B A states` in float32, in the dtype of `found`.

        Args:
            states: input of the linear module, `[..., in]`.
            found: its output, `[..., out]`; under sequence parallelism one of them has this rank's positions only.
        """
        low = F.linear(states.float(), torch.cat([getattr(self, f"a{at}") for at in range(len(self.lows))]))
        parts = torch.split(self._exchanged(low), self.rank, -1)
        # A rank without rows of a layer still takes part in the reduction of its A's gradient.
        added = [F.linear(part, self._rows_of(at, part)) for at, part in enumerate(parts)]
        return (found + self.scale * self._in_order(added)).to(found.dtype)

    def _rows_of(self, at: int, like: Tensor) -> Tensor:
        rows: Tensor = like.new_zeros(0, self.rank) if self.lows[at].b is None else getattr(self, f"b{at}")
        return rows

    def _exchanged(self, low: Tensor) -> Tensor:
        """`A x` of all positions beside columns; its sum over ranks, of the positions of the output, beside rows."""
        if self.by_rows:
            over_positions, whole = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        else:
            over_positions, whole = gather_from_sequence_parallel_region, copy_to_tensor_model_parallel_region
        exchanged: Tensor = (over_positions if self.sequence_parallel else whole)(low)
        return exchanged

    def _in_order(self, added: Sequence[Tensor]) -> Tensor:
        """Outputs of the adapters in the order of the fused weight's rows; 0 where a layer has none."""
        pieces: list[tuple[int, int, Tensor]] = []
        for low, values in zip(self.lows, added, strict=True):
            sizes = [rows.stop - rows.start for rows in low.features]
            split = torch.split(values, sizes, -1) if sizes else (values,)
            pieces += [
                (rows.start, rows.stop, piece) for rows, piece in zip(low.features or [slice(0, 0)], split, strict=True)
            ]
        ordered, end = list[Tensor](), 0
        for start, stop, piece in [*sorted(pieces, key=lambda one: one[:2]), (self.num_features, 0, added[0][..., :0])]:
            if start > end:
                ordered.append(piece.new_zeros(*piece.shape[:-1], start - end))
            ordered.append(piece)
            end = stop
        return torch.cat(ordered, -1)


@dataclass(frozen=True)
class Switch:
    """Of all adapters of a rank."""

    beside: Sequence[LowRank]

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The model computes as if it had no adapter, bit for bit."""
        for low in self.beside:
            low.enabled = False
        try:
            yield
        finally:
            for low in self.beside:
                low.enabled = True


def _add_adapter(linear: Any, inputs: tuple[Tensor, ...], found: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    """Forward hook of a linear module, which returns its output and a bias that somebody else adds."""
    if not linear.adapter.enabled:
        return None
    return linear.adapter(inputs[0], found[0]), found[1]
