"""An adapter whose float32 parts, gradients and moments are split over ranks by DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import Box
from rlsdk.kit.model.adapters import merged
from rlsdk.kit.model.sharded_adapter import ShardedAdapter
from rlsdk_deepspeed.shards import Piece


class DeepSpeedAdapter(ShardedAdapter[Piece]):
    """A and B as passes compute with them are whole on each rank, with ZeRO 3, too."""

    def tensors(self) -> list[Tensor]:
        """All memory of this rank besides gradients, moments and what passes compute with."""
        return [*(piece.flat for piece in self.pieces), *self.reference.values.values()]

    def merged(self, piece: Piece) -> Sequence[tuple[Box, Tensor]]:
        return list(self._merged(piece))

    def _merged(self, piece: Piece) -> Iterator[tuple[Box, Tensor]]:
        module = self.adapter.module_of(piece.name)
        if module is None:
            yield from piece.parts
            return
        low = self.adapter.parameters
        # Weights that passes do not use may be on the host.
        a, b = (low[f"{module}.lora_{kind}.weight"].detach().to(piece.flat.device) for kind in "AB")
        for box, values in piece.parts:
            rows, columns = box.slices(Box.whole(piece.shape))
            yield box, merged(values, a[:, columns], b[rows], self.adapter.spec.scale)

    def gather_merged(self, piece: Piece, writer: int, dtype: torch.dtype) -> Tensor | None:
        if self.adapter.module_of(piece.name) is not None and piece.parts:
            flat = torch.cat([values.flatten() for _, values in self.merged(piece)])
            piece = replace(piece, flat=flat, offset=0)
        return piece.gather(writer, dtype)
