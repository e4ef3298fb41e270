"""float8 weights with block scales, against the rule in plain loops, for any shape, block and cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.interfaces import BlockScales, Box, TensorMeta, WeightShard, WeightSyncError
from rlsdk.kit.weights.block_scales import (
    BlockQuantizer,
    block_maxima,
    blocks_of,
    dequantize,
    quantize,
    scales_bytes,
    scales_of,
    scales_shape,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plainly(values: Tensor, block: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(float8, scales), block by block, as DeepGEMM's `per_block_cast_to_fp8` rounds."""
    counts = [-(-n // b) for n, b in zip(values.shape, block, strict=True)]
    found, scales = torch.zeros(values.shape, dtype=torch.float8_e4m3fn), torch.zeros(counts)
    for at in itertools.product(*map(range, counts)):
        where = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))
        part = values[where].to(torch.float32)
        scale = torch.tensor(max(float(part.abs().max()), 1e-4), dtype=torch.float32) / 448
        scales[at] = scale
        found[where] = (part * (torch.ones(()) / scale)).to(torch.float8_e4m3fn)
    return found, scales


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-6, 3, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * spread).clamp(-6e4, 6e4).to(dtype)


def meta_of(shape: tuple[int, ...], block: tuple[int, ...]) -> TensorMeta:
    said = BlockScales(name="w_scale_inv", block=block, taken_as="float32")
    return TensorMeta(name="w", shape=shape, dtype="float8_e4m3fn", scales=said)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


@st.composite
def shapes_and_blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=dims, max_size=dims)))
    return shape, tuple(draw(st.lists(st.integers(1, 6), min_size=dims, max_size=dims)))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes of any cut that tile a tensor, in any order."""
    cuts = [sorted(draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=3)) | {0, n}) for n in shape]
    spans = [[(a, b - a) for a, b in itertools.pairwise(edges)] for edges in cuts]
    boxes = [Box(tuple(a for a, _ in at), tuple(n for _, n in at)) for at in itertools.product(*spans)]
    return draw(st.permutations(boxes))


@settings(max_examples=150, deadline=None)
@given(shapes_and_blocks(), st.integers(0, 10**6), st.sampled_from(DTYPES), st.data())
def test_whatever_the_cut_the_tensor_is_quantized_as_if_it_were_whole(
    case: tuple[tuple[int, ...], tuple[int, ...]], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    shape, block = case
    values = drawn(shape, seed, dtype)
    expected, scales = plainly(values, block)
    served = torch.full(shape, float("nan")).to(torch.float8_e4m3fn), torch.full(scales_shape(shape, block), -1.0)
    quantizer = BlockQuantizer(meta_of(shape, block), *served)
    buffer = torch.empty(values.numel(), dtype=dtype)
    for box in data.draw(tilings(shape)):
        part = values[box.slices(Box.whole(shape))]
        lent = buffer[: part.numel()].view(part.shape).copy_(part)
        quantizer.take(WeightShard(name="w", box=box, tensor=lent))
        buffer.fill_(float("nan"))  # A shard is the source's again as soon as it was taken.
    assert torch.equal(bits(served[0]), bits(expected))
    assert torch.equal(served[1], scales)
    assert quantizer.waiting_bytes == 0


@settings(max_examples=100, deadline=None)
@given(shapes_and_blocks(), st.integers(0, 10**6), st.data())
def test_parts_that_share_blocks_come_to_the_same_maxima_and_values(
    case: tuple[tuple[int, ...], tuple[int, ...]], seed: int, data: st.DataObject
) -> None:
    """What sources do who hold parts of blocks: the greatest of all is the block's."""
    shape, block = case
    values = drawn(shape, seed)
    expected, scales = plainly(values, block)
    boxes, whole = data.draw(tilings(shape)), Box.whole(shape)
    most = torch.zeros(scales_shape(shape, block))
    grid = Box.whole(tuple(most.shape))
    for box in boxes:
        here = blocks_of(box, block).slices(grid)
        most[here] = torch.maximum(most[here], block_maxima(values[box.slices(whole)], box, block))
    assert torch.equal(scales_of(most), scales)
    for box in boxes:
        found = quantize(values[box.slices(whole)], scales[blocks_of(box, block).slices(grid)], box, block)
        assert torch.equal(bits(found), bits(expected[box.slices(whole)]))


def test_a_worker_quantizes_its_own_blocks() -> None:
    values = drawn((300, 520), 3, torch.bfloat16)
    expected, scales = plainly(values, (128, 128))
    box = Box((128, 256), (172, 264))
    mine = torch.empty(box.size, dtype=torch.float8_e4m3fn)
    own_scales = torch.empty(2, 3)
    quantizer = BlockQuantizer(meta_of((300, 520), (128, 128)), mine, own_scales, box)
    for start in range(0, 300, 7):
        row = Box((start, 0), (min(7, 300 - start), 520))
        quantizer.take(WeightShard(name="w", box=row, tensor=values[start : start + 7]))
    assert torch.equal(bits(mine), bits(expected[128:300, 256:520]))
    assert torch.equal(own_scales, scales[1:3, 2:5])


def test_memory_is_bounded_by_strips_where_rows_come_in_order() -> None:
    shape = (1024, 256)
    quantizer = BlockQuantizer(
        meta_of(shape, (128, 128)), torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(8, 2)
    )
    values, most = drawn(shape, 1), 0
    for start in range(0, 1024, 96):
        size = min(96, 1024 - start)
        quantizer.take(WeightShard(name="w", box=Box((start, 0), (size, 256)), tensor=values[start : start + size]))
        most = max(most, quantizer.waiting_bytes)
    assert most == 128 * 256 * 4


def test_what_is_read_again_is_near() -> None:
    values = drawn((200, 300), 5)
    found, scales = plainly(values, (128, 128))
    again = dequantize(found, scales, (128, 128), torch.float32)
    step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    # Three bits behind the point: half of 2**-3 of a value, or half of the smallest subnormal, 2**-9.
    assert bool(((again - values).abs() <= torch.maximum(values.abs() * 2**-4, step * 2**-10) * 1.0001).all())
    assert scales_bytes((200, 300), (128, 128)) == 2 * 3 * 4


def test_zeros_stay_zero_and_what_is_not_finite_is_refused() -> None:
    served = torch.empty(4, 4, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    values = torch.zeros(4, 4)
    BlockQuantizer(meta_of((4, 4), (2, 2)), *served).take(WeightShard(name="w", box=Box.whole((4, 4)), tensor=values))
    assert torch.equal(served[0].float(), values)
    assert torch.equal(served[1], torch.full((2, 2), 1e-4) / 448)
    for bad in (float("inf"), float("nan")):
        values[3, 1] = bad
        with pytest.raises(WeightSyncError, match="'w' has values that are not finite"):
            BlockQuantizer(meta_of((4, 4), (2, 2)), *served).take(
                WeightShard(name="w", box=Box.whole((4, 4)), tensor=values)
            )
