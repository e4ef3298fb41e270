"""An adapter that is sharded like the weights beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlsdk.interfaces import ModelSpec, fingerprint
from rlsdk.kit.model.adapter_files import initial_values, write_adapter
from rlsdk.kit.model.adapters import KeptReference, ModelAdapter, base_digest, count_moved
from rlsdk.kit.model.part_loading import fill_piece
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks
from rlsdk_fsdp.shards import Piece, pieces_of


class ShardedAdapter:
    """One rank's part of an adapter, float32; and a copy of each whole A, with which the rank adds the adapter to its
    own rows of a weight without communication."""

    def __init__(self, adapter: ModelAdapter, base: Sequence[Piece], seed: int) -> None:
        """Collective: every rank must call.

        Args:
            adapter: of a model that was sharded and allocated.
            base: the pieces of the frozen weights.
            seed: of the run.
        """
        self.adapter, self.base = adapter, base
        self.pieces = pieces_of(adapter.parameters)
        first = dict(initial_values(adapter, seed))
        for piece in self.pieces:
            fill_piece(piece, first[piece.name])
        self._held = {piece.name: piece.held for piece in self.pieces}
        self.reference = KeptReference(adapter, self._held)
        self._whole_a: dict[str, Tensor] = {}
        self._digest: str | None = None
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

    def merged(self, piece: Piece) -> Tensor:
        """This rank's rows of a weight, with the adapter added if it has one."""
        return self.adapter.merged(piece.name, piece.held, self._whole_a, self._held)

    def gather_merged(self, piece: Piece, writer: int, dtype: torch.dtype) -> Tensor | None:
        """As `Piece.gather`, with the adapter added if the weight has one."""
        module = self.adapter.module_of(piece.name)
        if module is None:
            return piece.gather(writer, dtype)
        name = f"{module}.lora_B.weight"
        low = next(low for low in self.pieces if low.name == name)
        weight, b = piece.gather(writer, piece.held.dtype), low.gather(writer, torch.float32)
        if weight is None or b is None:
            return None
        return self.adapter.merged(piece.name, weight, self._whole_a, {name: b}).to(dtype)

    def moved_share(self) -> float:
        """See `TrainEngine`."""
        adapted = [piece for piece in self.base if self.adapter.module_of(piece.name) is not None]
        counts = torch.tensor(count_moved((piece.held, self.merged(piece)) for piece in adapted))
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def save(self, path: Path, model: Any, spec: ModelSpec) -> None:
        """Writes PEFT's two files, on rank 0. Collective: every rank must call."""
        tensors = {piece.name: piece.gather(0, torch.float32) for piece in self.pieces}
        with raise_on_all_ranks(f"{path} cannot be written"):
            if dist.get_rank() == 0:
                whole = {name: values for name, values in tensors.items() if values is not None}
                write_adapter(path, model, self.adapter, whole, spec)

    def base_digest(self, mesh: DeviceMesh) -> str:
        """Fingerprint of the frozen weights. Collective: every rank must call."""
        if self._digest is None:
            sums = torch.tensor([fingerprint(piece.held.detach(), piece.box) for piece in self.base])
            dist.all_reduce(sums, group=mesh.get_group(mesh.ndim - 1))
            found = dict(zip((piece.name for piece in self.base), sums.tolist(), strict=True))
            self._digest = base_digest(found, self.adapter.spec)
        return self._digest
