"""Targets that quantize: constraints on their layouts, and their verification.

A block's scale needs its largest magnitude, and a block may be split over several sources. Verification therefore has
two rounds: for split blocks, each source returns the largest magnitude of its part; then each returns the fingerprint
of its own part, and of the scales of blocks that it holds completely, which never leave it. Nothing is computed from
the sent weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rlsdk.interfaces import Box, LayoutError, QuantizedPiece, TensorMeta, WeightLayout, fingerprint
from rlsdk.kit.weights.block_scales import DTYPE_NAME, blocks_of, scales_of, scales_shape, shared_blocks

Maxima = NDArray[np.float32]
Ints = NDArray[np.int64]
SharedBlocks = tuple[Ints, Maxima]
"""Positions in the flat tensor of scales, in order, and the largest magnitude of each block."""


def check_scales(target: Sequence[WeightLayout], tensors: Sequence[TensorMeta]) -> None:
    """Raises `LayoutError` if the description of a tensor with block scales is invalid.

    Args:
        target: the target's layouts.
        tensors: from `distinct_tensors`.
    """
    names = {meta.name for meta in tensors}
    scaled = {meta.name: meta for meta in tensors if meta.scales is not None}
    for meta in scaled.values():
        _check_meta(meta, names)
    if not scaled:
        return
    for layout in target:
        mine = {meta.name: meta for meta in layout.tensors if meta.scales is not None}
        for name, box in layout.boxes:
            if name in mine:
                _check_box(mine[name], box, layout)


def _check_meta(meta: TensorMeta, names: set[str]) -> None:
    assert meta.scales is not None
    if meta.dtype != DTYPE_NAME:
        raise LayoutError(f"{meta.name!r}: has block scales and dtype {meta.dtype}; expected {DTYPE_NAME}")
    if meta.scales.taken_as.startswith("float8") or "float" not in meta.scales.taken_as:
        raise LayoutError(
            f"{meta.name!r}: is quantized of values in {meta.scales.taken_as}; expected float32, bfloat16 or float16"
        )
    if len(meta.scales.block) != len(meta.shape) or not meta.shape or min(meta.scales.block) < 1:
        raise LayoutError(
            f"{meta.name!r}: blocks of {list(meta.scales.block)} do not fit its shape {list(meta.shape)}: expected one "
            "positive number for each dimension"
        )
    if meta.scales.name in names:
        raise LayoutError(
            f"{meta.name!r}: its scales are named {meta.scales.name!r}, as a tensor that weights are taken for; scales "
            "are made at the target and are in no layout's tensors"
        )


def _check_box(meta: TensorMeta, box: Box, layout: WeightLayout) -> None:
    assert meta.scales is not None
    for offset, size, block, length in zip(box.offset, box.size, meta.scales.block, meta.shape, strict=True):
        if offset % block or ((offset + size) % block and offset + size != length):
            raise LayoutError(
                f"{meta.name!r}: {layout.worker or f'target rank {layout.rank}'} serves offset {list(box.offset)} of "
                f"size {list(box.size)} with scales for blocks of {list(meta.scales.block)}: a box begins and ends at "
                "the edge of a block. Choose a smaller tensor-parallel size, or smaller blocks"
            )


@dataclass(frozen=True)
class QuantizedProof:
    """The computations of the sources that verify tensors that replicas quantize."""

    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    """Tensors by name; each has scales."""
    pieces: tuple[tuple[QuantizedPiece, ...], ...] = ()
    """Pieces by source; together they cover the replicas' boxes, each exactly once."""

    @property
    def scales(self) -> dict[str, str]:
        """Name of each tensor -> name of its scales."""
        return {name: meta.scales.name for name, meta in self.tensors.items() if meta.scales is not None}

    def joined(self, parts: Sequence[Sequence[Maxima]]) -> dict[str, SharedBlocks]:
        """By tensor, the blocks that are split between pieces, joined from the maxima of each source. NaN if any part
        is NaN."""
        found: dict[str, list[tuple[Ints, Maxima]]] = {}
        for pieces, maxima in zip(self.pieces, parts, strict=True):
            for piece, values in zip(pieces, maxima, strict=True):
                if len(values):
                    found.setdefault(piece.transfer.name, []).append((_shared_places(piece), values))
        return {name: _joined(said) for name, said in found.items()}

    def of_pieces(self, shared: Mapping[str, SharedBlocks]) -> list[list[Maxima]]:
        """For each source and piece, the maxima of the blocks that it contains only partly."""
        return [[_of_piece(piece, shared) for piece in pieces] for pieces in self.pieces]

    def scale_fingerprints(self, shared: Mapping[str, SharedBlocks]) -> dict[str, int]:
        """Fingerprints of the scales of these blocks, by the name of the tensor of scales; sources add the other
        blocks."""
        found = {}
        for name, (places, maxima) in shared.items():
            meta = self.tensors[name]
            assert meta.scales is not None
            shape = scales_shape(meta.shape, meta.scales.block)
            scales = torch.zeros(math.prod(shape))  # zeros do not change the sum
            scales[torch.from_numpy(places)] = scales_of(torch.from_numpy(maxima))
            found[meta.scales.name] = fingerprint(scales.view(shape), Box.whole(shape))
        return found


def _shared_places(piece: QuantizedPiece) -> Ints:
    """Positions, in the flat tensor of scales, of the blocks that a piece contains only partly."""
    box, shape = piece.transfer.box, scales_shape(piece.shape, piece.block)
    mask = shared_blocks(box, piece.block, piece.shape).numpy()
    offset = blocks_of(box, piece.block).offset
    where = tuple(at + low for at, low in zip(np.nonzero(mask), offset, strict=True))
    return np.ravel_multi_index(where, shape).astype(np.int64)


def _joined(said: Sequence[tuple[Ints, Maxima]]) -> SharedBlocks:
    places, inverse = np.unique(np.concatenate([places for places, _ in said]), return_inverse=True)
    maxima = np.zeros(len(places), np.float32)
    np.maximum.at(maxima, inverse, np.concatenate([values for _, values in said]))
    return places, maxima


def _of_piece(piece: QuantizedPiece, shared: Mapping[str, SharedBlocks]) -> Maxima:
    if piece.transfer.name not in shared:
        return np.zeros(0, np.float32)
    places, maxima = shared[piece.transfer.name]
    return maxima[np.searchsorted(places, _shared_places(piece))]
