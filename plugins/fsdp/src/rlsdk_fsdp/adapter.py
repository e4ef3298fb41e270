"""An adapter that is sharded like the weights beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsdk.interfaces import Box
from rlsdk.kit.model.adapters import ModelAdapter
from rlsdk.kit.model.sharded_adapter import ShardedAdapter
from rlsdk_fsdp.shards import Piece, pieces_of


class FsdpAdapter(ShardedAdapter[Piece]):
    """Rows of A and B; and a copy of each whole A, with which a rank adds the adapter to its own rows of a weight
    without communication."""

    def __init__(self, adapter: ModelAdapter, base: Sequence[Piece], *, copies: int, seed: int) -> None:
        """As `ShardedAdapter`. Collective: every rank must call."""
        super().__init__(adapter, pieces_of(adapter.parameters), base, copies=copies, seed=seed)
        self._held = {piece.name: piece.held for piece in self.pieces}
        self._whole_a: dict[str, Tensor] = {}
        self.spread()

    def tensors(self) -> list[Tensor]:
        """All memory of this rank besides gradients and moments."""
        held = [piece.held for piece in self.pieces]
        return [*held, *self._whole_a.values(), *self.reference.values.values()]

    @torch.no_grad()
    def spread(self) -> None:
        """Gives every rank the current values of each whole A. Collective: after each change of values."""
        for piece in self.pieces:
            if ".lora_A." in piece.name:
                values = piece.everywhere()
                self._whole_a.setdefault(piece.name, torch.empty_like(values)).copy_(values)

    def merged(self, piece: Piece) -> Sequence[tuple[Box, Tensor]]:
        return [(box, self.adapter.merged(piece.name, rows, self._whole_a, self._held)) for box, rows in piece.parts]

    def gather_merged(self, piece: Piece, writer: int, dtype: torch.dtype) -> Tensor | None:
        module = self.adapter.module_of(piece.name)
        if module is None:
            return piece.gather(writer, dtype)
        name = f"{module}.lora_B.weight"
        low = next(low for low in self.pieces if low.name == name)
        weight, b = piece.gather(writer, piece.held.dtype), low.gather(writer, torch.float32)
        if weight is None or b is None:
            return None
        return self.adapter.merged(piece.name, weight, self._whole_a, {name: b}).to(dtype)
