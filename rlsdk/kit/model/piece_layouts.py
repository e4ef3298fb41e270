"""Layouts and shards of an engine whose ranks hold boxes of parameters, and buffers whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlsdk.interfaces import Box, RankContext, TensorMeta, WeightLayout, WeightShard
from rlsdk.kit.model import part_loading
from rlsdk.kit.model.hf import dtype_names


class Piece(part_loading.Piece, Protocol):
    """One rank's part of a parameter, with its values."""

    @property
    def parts(self) -> Sequence[tuple[Box, Tensor]]:
        """This rank's boxes, each with a view of its values."""


def piece_layout(
    ctx: RankContext, pieces: Iterable[Piece], buffers: Mapping[str, Tensor], tied: Mapping[str, str], *, device: str
) -> WeightLayout:
    """The layout of these parts and of whole buffers; `piece_shards` and `buffer_shards` have their values.

    Args:
        ctx: of this rank.
        pieces: of any parameters; those of which this rank has nothing are left out.
        buffers: persistent ones by name.
        tied: as in `WeightLayout`.
        device: that the values are on.
    """
    held = {piece.name: piece for piece in pieces if piece.parts}
    dtypes = dtype_names({name: piece.parts[0][1] for name, piece in held.items()} | dict(buffers))
    shapes = {name: piece.shape for name, piece in held.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    return WeightLayout(
        rank=ctx.rank,
        node=ctx.node,
        device=device,
        process=f"{ctx.node}:{os.getpid()}",
        tensors=tuple(TensorMeta(name=name, shape=shape, dtype=dtypes[name]) for name, shape in shapes.items()),
        boxes=(
            *((piece.name, box) for piece in held.values() for box, _ in piece.parts),
            *((name, Box.whole(shapes[name])) for name in buffers),
        ),
        tied=tied,
    )


def piece_shards(pieces: Iterable[Piece]) -> Iterator[WeightShard]:
    """Views of what this rank holds, in the order of `piece_layout`."""
    for piece in pieces:
        for box, values in piece.parts:
            yield WeightShard(name=piece.name, box=box, tensor=values)


def buffer_shards(buffers: Mapping[str, Tensor], *, device: str | None = None) -> Iterator[WeightShard]:
    """Whole buffers; `device`: that they are copied to if they are on another."""
    for name, buffer in buffers.items():
        here = buffer.detach() if device is None else buffer.detach().to(device)
        yield WeightShard(name=name, box=Box.whole(tuple(buffer.shape)), tensor=here)
