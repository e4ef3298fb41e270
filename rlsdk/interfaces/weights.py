"""The one language of weights: boxes of canonical tensors.

Canonical names, shapes and orientation are those of the model's Hugging Face checkpoint. Every engine describes what
each of its ranks holds, or wants, as boxes of canonical tensors. Fused, interleaved or padded storage is the
engine's own business: it hands out one view per box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlsdk.interfaces.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Box:
    """An axis-aligned piece of a tensor: `offset[d] <= index[d] < offset[d] + size[d]` in every dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size) or min((*self.offset, *self.size, 0)) < 0:
            raise LayoutError(f"box offset {self.offset} and size {self.size} must match and be non-negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)]
        size = tuple(h - lo for h, lo in zip(high, low, strict=True))
        return Box(low, size) if min(size, default=1) > 0 else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that stores `within`."""
        return tuple(slice(o - w, o - w + n) for o, w, n in zip(self.offset, within.offset, self.size, strict=True))


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """A canonical tensor: name, full shape, and the dtype it is held in."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """What one rank holds (train) or wants (rollout). Plain data: it can be sent, printed and hashed."""

    rank: int
    node: str
    """Equal on two ranks that can share memory."""
    device: str
    """`cpu` or `cuda:N`."""
    process: str
    """Equal on two ranks that live in one process (`node:pid`)."""
    tensors: tuple[TensorMeta, ...]
    """Every canonical tensor of the model that this rank has a part of."""
    boxes: tuple[tuple[str, Box], ...]
    """Name and box of each part, in the order in which `shards()` yields them. Boxes of one rank do not overlap."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name of a tied tensor -> the name under which its one copy is held. Only the latter is in `tensors`."""


@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """A box of a canonical tensor, with its values."""

    name: str
    box: Box
    tensor: Tensor
    """Shape equals `box.size`. From a train engine: a view of its own memory (no copy, no gather), valid until the
    next call that changes weights. Into a rollout engine: valid until the next item is taken."""


def fingerprint(tensor: Tensor, box: Box) -> int:
    """A checksum of a box that adds up: the fingerprints of any boxes that tile a tensor sum to the tensor's.

    Sum over elements of bits(element) * (1 + row + 31 * column) modulo 2**64, with the bit pattern as a signed
    integer of the element's width, `row` its index in dimension 0 of the full tensor and `column` the sum of its
    other indices. It depends on values, dtype and place, not on how the tensor is cut.

    Args:
        tensor: values of the box, any device, any dtype of 1, 2, 4 or 8 bytes.
        box: where in the canonical tensor they stand.
    """
    import torch

    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    if tensor.numel() == 0:
        return 0
    bits = (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor.contiguous()).view(width)
    total = int(bits.sum(dtype=torch.int64))
    for axis in range(bits.dim()):
        other = [d for d in range(bits.dim()) if d != axis]
        along = bits.sum(dim=other, dtype=torch.int64) if other else bits.to(torch.int64)
        index = torch.arange(bits.shape[axis], device=bits.device) + box.offset[axis]
        total += int((along * index).sum()) * (1 if axis == 0 else 31)
    return total % 2**64


@dataclass(frozen=True, kw_only=True)
class SyncReceipt:
    """Proof that a rollout engine serves what it was sent; one per replica and sync."""

    version: int
    """Policy version now served: optimizer steps contained in the weights."""
    num_tensors: int
    """Canonical tensors that arrived, tied copies not counted."""
    num_bytes: int
    """Bytes that arrived, in the dtype they are served in."""
    fingerprints: Mapping[str, int]
    """Canonical name -> `fingerprint` of what is now served, computed by the engine after loading, over its own memory
    (not over what arrived)."""
    seconds: float = 0.0
