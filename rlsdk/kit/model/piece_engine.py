"""Train engines whose ranks hold pieces of parameters, and buffers whole: what follows from the pieces alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from rlsdk.interfaces import ModelSpec, RankContext, TrainSpec, WeightLayout, WeightPart, WeightShard
from rlsdk.kit.files.export import ExportedTensor, in_dtype, write_model
from rlsdk.kit.model.adapter_engine import AdapterEngine
from rlsdk.kit.model.divergence import load_teacher_head
from rlsdk.kit.model.hf import persistent_buffers
from rlsdk.kit.model.outputs import OutputModel, TeacherHead
from rlsdk.kit.model.piece_layouts import buffer_shards, piece_layout, piece_shards
from rlsdk.kit.model.sharded_adapter import P, ShardedAdapter
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PieceEngine(AdapterEngine, Generic[P]):
    """One rank of an engine that splits a transformers model. `initialize` sets these attributes."""

    ctx: RankContext
    spec: TrainSpec
    device: torch.device
    model: PreTrainedModel
    outputs: OutputModel
    """Around `model`."""
    pieces: Sequence[P]
    """Of the model's own weights."""
    trained: Sequence[P]
    """Of what the optimizer steps and checkpoints hold: `pieces`, or those of A and B."""
    tied: Mapping[str, str]
    """Other names of a parameter -> its canonical name."""
    adapter: ShardedAdapter[P] | None

    @abstractmethod
    def device_of(self, pieces: Sequence[P]) -> str:
        """Where the values of these pieces are, and where the buffers beside them are handed out."""

    def layout(self) -> WeightLayout:
        # Every rank has the full tensors.
        return self._layout_of(self.pieces, persistent_buffers(self.model), self.tied)

    def shards(self) -> Iterator[WeightShard]:
        yield from piece_shards(self.pieces) if self.adapter is None else self.adapter.shards()
        yield from self._buffer_shards()

    def part_layout(self, part: WeightPart) -> WeightLayout:
        return self._layout_of(self.trained, {}, {}) if part is WeightPart.ADAPTER else self.layout()

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        yield from piece_shards(self.trained if part is WeightPart.ADAPTER else self.pieces)
        if part is WeightPart.BASE:
            yield from self._buffer_shards()

    def save_pretrained(self, path: Path) -> None:
        """See `TrainEngine`. Ranks write files concurrently; each tensor is gathered only on its writer."""
        if self.adapter is not None and self.adapter.adapter.spec.export == "adapter":
            self.adapter.save(path, self.model, self.spec.model)
            return
        pieces = {piece.name: piece for piece in self.pieces}
        buffers = persistent_buffers(self.model)
        tensors = in_dtype({piece.name: piece.shape for piece in self.pieces}, getattr(torch, self.spec.model.dtype))
        tensors += [ExportedTensor(name=name, shape=tuple(b.shape), dtype=b.dtype) for name, b in buffers.items()]

        def fetch(tensor: ExportedTensor, writer: int) -> Tensor | None:
            if tensor.name in buffers:
                return buffers[tensor.name]
            piece = pieces[tensor.name]
            if self.adapter is None:
                return piece.gather(writer, tensor.dtype)
            return self.adapter.gather_merged(piece, writer, tensor.dtype)

        with raise_on_all_ranks(f"{path} cannot be written"):
            write_model(
                path,
                self.model.config,
                tensors,
                fetch,
                rank=self.ctx.rank,
                world_size=self.ctx.world_size,
                source=self.spec.model.path,
            )

    def load_teacher(self, spec: ModelSpec, number: int = 0) -> None:
        self.outputs.teachers[number] = TeacherHead(load_teacher_head(spec, self.device))

    def _layout_of(self, pieces: Sequence[P], buffers: Mapping[str, Tensor], tied: Mapping[str, str]) -> WeightLayout:
        return piece_layout(self.ctx, pieces, buffers, tied, device=self.device_of(pieces))

    def _buffer_shards(self) -> Iterator[WeightShard]:
        yield from buffer_shards(persistent_buffers(self.model), device=self.device_of(self.pieces))
