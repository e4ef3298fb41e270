"""The additive fingerprint, against its formula in plain Python integers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import shapes, sources

from rlsdk.interfaces import FINGERPRINT_MODULUS, Box, WeightLayout, fingerprint
from rlsdk.sharding.plan.boxes import subtract

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool", "float8_e4m3fn")


def whole(tensor: torch.Tensor) -> int:
    return fingerprint(tensor, Box.whole(tuple(tensor.shape)))


def weight(axis: int, at: int) -> int:
    """The weight of an index, by the arithmetic of 64-bit signed integers."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    value = at + 1 + (axis << 40)
    value = signed((value ^ (value >> 31)) * 0x7FB5D329728EA185)
    value = signed((value ^ (value >> 27)) * 0x01DADEF4BC2DD44D)
    return ((value >> 32) | 1) % FINGERPRINT_MODULUS


def by_the_formula(tensor: torch.Tensor) -> int:
    """Element by element; 8-byte elements are two 4-byte ones along a last axis."""
    if tensor.element_size() == 8:
        tensor = tensor.unsqueeze(-1)
    bits = tensor.view({1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32))
    array = bits.numpy()
    return (
        sum(int(array[at]) * math.prod(weight(d, i) for d, i in enumerate(at)) for at in np.ndindex(array.shape))
        % FINGERPRINT_MODULUS
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 3)])
def test_equals_its_formula(dtype: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).mul(50).to(getattr(torch, dtype))
    assert whole(values) == by_the_formula(values)


@settings(max_examples=150, deadline=None)
@given(st.data(), shapes())
def test_adds_up_over_any_boxes_that_tile_the_tensor(data: st.DataObject, tensors: dict[str, tuple[int, ...]]) -> None:
    layouts: list[WeightLayout] = data.draw(sources(tensors))
    for name, shape in tensors.items():
        tensor = torch.randn(shape)
        full, total = Box.whole(shape), 0
        rest = [full]
        for held in (box for layout in layouts for n, box in layout.boxes if n == name):
            for part in (open_box.intersect(held) for open_box in rest):
                if part is not None:
                    total += fingerprint(tensor[part.slices(full)], part)
            rest = [left for open_box in rest for left in subtract(open_box, held)]
        assert rest == []
        assert total % FINGERPRINT_MODULUS == whole(tensor)


def test_sees_a_single_flipped_bit_anywhere() -> None:
    tensor = torch.randn(7, 5)
    before = whole(tensor)
    for at in range(35):
        for bit in (0, 15, 31):
            changed = tensor.clone()
            flat = changed.view(-1).view(torch.int32)
            flat[at] ^= torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32)
            assert whole(changed) != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sees_rows_columns_and_halves_that_changed_places(dtype: str) -> None:
    tensor = torch.randn(64, 64).to(getattr(torch, dtype))
    before = whole(tensor)
    shuffled = [
        tensor.t(),
        tensor.flip(0),
        tensor.flip(1),
        tensor.roll(1, 0),
        tensor.roll(32, 1),
        tensor[torch.randperm(64, generator=torch.Generator().manual_seed(3))],
        tensor.reshape(2, 32, 64).transpose(0, 1).reshape(64, 64),
    ]
    assert before not in [whole(other) for other in shuffled]


def test_reads_strided_views_without_minding_their_order_in_memory() -> None:
    tensor = torch.randn(6, 10)
    assert whole(tensor.t().contiguous().t()) == whole(tensor)
    assert whole(torch.cat([tensor, tensor], 1)[:, :10]) == whole(tensor)
    assert whole(torch.stack([tensor, tensor], 2)[..., 0]) == whole(tensor)


def test_a_parameter_with_gradient_needs_no_care() -> None:
    assert whole(torch.nn.Parameter(torch.ones(3, 3))) == whole(torch.ones(3, 3))
