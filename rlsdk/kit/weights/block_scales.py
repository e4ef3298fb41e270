"""float8 weights with one scale per block: quantization and dequantization.

Same rule as `per_block_cast_to_fp8` in DeepGEMM, vLLM and SGLang, with float32 scales: the scale of a block is its
largest magnitude, at least `LEAST_MAXIMUM`, divided by 448; values are multiplied by 1 / scale in float32 and rounded
to the nearest float8_e4m3fn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor

from rlsdk.interfaces import Box, ConfigError, TensorMeta, WeightShard, WeightSyncError

DTYPE = torch.float8_e4m3fn
DTYPE_NAME = "float8_e4m3fn"
SCALES_SUFFIX = "_scale_inv"
"""Suffix of the name of a tensor's scales, as in DeepSeek-V3's files, vLLM and SGLang."""
LARGEST = torch.finfo(DTYPE).max
LEAST_MAXIMUM = 1e-4
"""Smallest block maximum used; blocks with smaller values are quantized as if they had it, so that no scale is 0."""


def scales_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Shape of the tensor of scales for a tensor of this shape.

    Raises:
        ConfigError: the block does not fit the shape's dimensions.
    """
    if len(shape) != len(block) or min(block, default=1) < 1:
        raise ConfigError(f"a block of {list(block)} elements does not fit a tensor of shape {list(shape)}")
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def blocks_of(box: Box, block: Sequence[int]) -> Box:
    """The blocks that a box overlaps, as a box of the tensor of scales."""
    low = [o // b for o, b in zip(box.offset, block, strict=True)]
    high = [-(-(o + n) // b) for o, n, b in zip(box.offset, box.size, block, strict=True)]
    return Box(tuple(low), tuple(h - lo for lo, h in zip(low, high, strict=True)))


def whole_blocks(box: Box, block: Sequence[int], shape: Sequence[int]) -> Box:
    """The blocks that a box contains completely, as a box of the tensor of scales; often empty."""
    low = [-(-o // b) for o, b in zip(box.offset, block, strict=True)]
    ends = [o + n for o, n in zip(box.offset, box.size, strict=True)]
    high = [-(-end // b) if end == n else end // b for end, n, b in zip(ends, shape, block, strict=True)]
    return Box(tuple(low), tuple(max(0, h - lo) for lo, h in zip(low, high, strict=True)))


def shared_blocks(box: Box, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Which of the blocks that a box overlaps it does not contain completely: bool, shape `blocks_of(box,
    block).size`."""
    touched, own = blocks_of(box, block), whole_blocks(box, block, shape)
    partial = torch.ones(touched.size, dtype=torch.bool)
    if own.numel:
        partial[own.slices(within=touched)] = False
    return partial


def block_maxima(values: Tensor, box: Box, block: Sequence[int]) -> Tensor:
    """Largest magnitude of the values of a box in each block.

    Args:
        values: of the box; any float dtype.
        box: their position in the tensor; it may begin and end inside blocks.
        block: elements in each dimension.

    Returns:
        float32, of shape `blocks_of(box, block).size`. NaN where a value is.
    """
    maxima = values.abs().float()
    for axis, (offset, size, length) in enumerate(zip(box.offset, box.size, block, strict=True)):
        maxima = maxima.movedim(axis, 0)
        edges = [0, *range(length - offset % length, size, length), size]
        maxima = torch.stack([maxima[a:b].amax(0) for a, b in pairwise(edges)])
        maxima = maxima.movedim(0, axis)
    return maxima.contiguous()


def scales_of(maxima: Tensor) -> Tensor:
    """float32 scale of each block, from its largest magnitude."""
    return maxima.float().clamp(min=LEAST_MAXIMUM) / LARGEST


def expand_scales(scales: Tensor, box: Box, block: Sequence[int]) -> Tensor:
    """The scale of each element of a box.

    Args:
        scales: of the blocks that the box overlaps, shape `blocks_of(box, block).size`.
        box: in the quantized tensor.
        block: elements in each dimension.
    """
    for axis, (offset, size, length) in enumerate(zip(box.offset, box.size, block, strict=True)):
        begin = offset % length
        scales = scales.repeat_interleave(length, axis).narrow(axis, begin, size)
    return scales


def quantize(values: Tensor, scales: Tensor, box: Box, block: Sequence[int]) -> Tensor:
    """Quantizes the values of a box with the scales of the blocks that it overlaps."""
    return (values.float() * expand_scales(1.0 / scales, box, block)).to(DTYPE)


def dequantize(values: Tensor, scales: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A whole tensor in another dtype: value * scale, rounded once."""
    whole = Box.whole(tuple(values.shape))
    return (values.float() * expand_scales(scales, whole, block)).to(dtype)


class BlockQuantizer:
    """Quantizes one tensor, or the part of it that a worker serves, while its values arrive in arbitrary boxes.

    A block can be quantized only when all its values have arrived. Values wait in strips: whole blocks in all
    dimensions but the last, which is that of the memory. A strip is allocated with its first value and freed after its
    last.
    """

    def __init__(self, meta: TensorMeta, values: Tensor, scales: Tensor, box: Box | None = None) -> None:
        """Binds the memory that serves.

        Args:
            meta: of the tensor, with its scales.
            values: float8_e4m3fn, of the box.
            scales: float32, of the box's blocks.
            box: of the tensor; it begins and ends at the edges of blocks. None: all of it.
        """
        assert meta.scales is not None
        self._name, self._block, self._shape = meta.name, meta.scales.block, meta.shape
        self._values, self._scales, self._box = values, scales, box or Box.whole(meta.shape)
        self._waiting: dict[Box, tuple[Tensor, int]] = {}

    @torch.no_grad()
    def take(self, shard: WeightShard) -> None:
        """Copies the values in the box, and quantizes strips that are complete. No element may arrive twice.

        Raises:
            WeightSyncError: a value is not finite.
        """
        here = shard.box.intersect(self._box)
        if here is None:
            return
        for strip in self._strips(here):
            common = strip.intersect(here)
            assert common is not None
            part = shard.tensor[common.slices(shard.box)]
            if common == strip:
                self._finish(strip, part)
                continue
            held, lacking = self._waiting.pop(strip, (None, strip.numel))
            if held is None:
                held = torch.empty(strip.size, dtype=shard.tensor.dtype, device=self._values.device)
            held[common.slices(strip)] = part
            if lacking == common.numel:
                self._finish(strip, held)
            else:
                self._waiting[strip] = held, lacking - common.numel

    @property
    def waiting_bytes(self) -> int:
        """Bytes of incomplete strips."""
        return sum(held.nbytes for held, _ in self._waiting.values())

    def _strips(self, box: Box) -> Iterator[Box]:
        """The strips that a box overlaps."""
        cuts = []
        for axis, length in enumerate(self._block[:-1]):
            first, end = box.offset[axis] // length * length, box.offset[axis] + box.size[axis]
            cuts.append([(at, min(length, self._shape[axis] - at)) for at in range(first, end, length)])
        cuts.append([(self._box.offset[-1], self._box.size[-1])])
        for spans in product(*cuts):
            yield Box(tuple(at for at, _ in spans), tuple(size for _, size in spans))

    def _finish(self, strip: Box, values: Tensor) -> None:
        values = values.to(self._values.device)
        maxima = block_maxima(values, strip, self._block)
        if not bool(maxima.isfinite().all()):
            raise WeightSyncError(
                f"{self._name!r} has values that are not finite: they cannot be quantized. "
                "Training has diverged, or the weights are damaged"
            )
        scales, blocks = scales_of(maxima), blocks_of(strip, self._block)
        self._scales[blocks.slices(blocks_of(self._box, self._block))] = scales
        self._values[strip.slices(self._box)] = quantize(values, scales, strip, self._block)


def scales_bytes(shape: Sequence[int], block: Sequence[int]) -> int:
    """Bytes of the scales of a tensor."""
    return 4 * math.prod(scales_shape(shape, block))
