"""Targets that quantize: what their layouts must fit, and what proves them.

A block's scale needs its largest magnitude, and parts of a block may lie on several sources. So a proof has two rounds:
each source says the largest magnitude that it holds of each block, and then the fingerprint of its own part under the
scales of whole blocks. Nothing of it is computed from what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rlsdk.interfaces import Box, LayoutError, QuantizedPiece, TensorMeta, WeightLayout, fingerprint
from rlsdk.kit.block_scales import DTYPE_NAME, blocks_of, scales_of, scales_shape
from rlsdk.sharding.holders import distinct_tensors

Maxima = NDArray[np.float32]


def check_scales(target: Sequence[WeightLayout]) -> None:
    """Raises `LayoutError` where a tensor with block scales is described in a way that nobody could serve."""
    tensors = distinct_tensors(target)
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
    """What the sources compute of tensors that replicas quantize."""

    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    """By name; each has scales."""
    pieces: tuple[tuple[QuantizedPiece, ...], ...] = ()
    """Per source; together they tile what the replicas want, each box once."""

    def whole_maxima(self, parts: Sequence[Sequence[Maxima]]) -> dict[str, Maxima]:
        """Largest magnitude of each block, of what each source says of its pieces. NaN where any is."""
        found = {
            name: np.zeros(scales_shape(meta.shape, meta.scales.block), np.float32)
            for name, meta in self.tensors.items()
            if meta.scales is not None
        }
        for pieces, maxima in zip(self.pieces, parts, strict=True):
            for piece, values in zip(pieces, maxima, strict=True):
                place = found[piece.transfer.name][_place(piece)]
                np.maximum(place, values, out=place)
        return found

    def of_pieces(self, maxima: Mapping[str, Maxima]) -> list[list[Maxima]]:
        """Per source and piece, the maxima of the blocks that it has a part of."""
        return [[maxima[piece.transfer.name][_place(piece)] for piece in pieces] for pieces in self.pieces]

    def scale_fingerprints(self, maxima: Mapping[str, Maxima]) -> dict[str, int]:
        """Of the tensors of scales."""
        found = {}
        for name, meta in self.tensors.items():
            assert meta.scales is not None
            scales = scales_of(torch.from_numpy(maxima[name]))
            found[meta.scales.name] = fingerprint(scales, Box.whole(tuple(scales.shape)))
        return found


def _place(piece: QuantizedPiece) -> tuple[slice, ...]:
    blocks = blocks_of(piece.transfer.box, piece.block)
    return tuple(slice(o, o + n) for o, n in zip(blocks.offset, blocks.size, strict=True))
