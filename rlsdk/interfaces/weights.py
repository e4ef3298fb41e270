"""The common description of weights: boxes of canonical tensors.

Canonical names, shapes and orientation are those of the model's Hugging Face checkpoint. Every engine describes what
each of its ranks holds, or wants, as boxes of canonical tensors. An engine may fuse, interleave or pad its storage: it
exposes one view per box.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlsdk.interfaces.errors import LayoutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class WeightPart(StrEnum):
    """Which weights of a model with an adapter a layout describes (`Capability.ADAPTER_SYNC`)."""

    BASE = "base"
    """The canonical weights without the adapter, which stay as they are: sent once."""
    ADAPTER = "adapter"
    """A and B alone, float32: a layer with weight `NAME.weight` has `NAME.lora_A.weight` `[rank, in]` and
    `NAME.lora_B.weight` `[out, rank]`. Sent after each step."""


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
        """The intersection, or None if it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)]
        size = tuple(h - lo for h, lo in zip(high, low, strict=True))
        return Box(low, size) if min(size, default=1) > 0 else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that stores `within`."""
        return tuple(slice(o - w, o - w + n) for o, w, n in zip(self.offset, within.offset, self.size, strict=True))


@dataclass(frozen=True, kw_only=True)
class BlockScales:
    """A rollout engine serves a tensor as `float8_e4m3fn` with one float32 scale per block, as in DeepSeek-V3's
    checkpoints (arXiv:2412.19437, section 3.3.2). Weights are transferred unquantized; the engine quantizes what
    arrives (`rlsdk.kit.weights.block_scales`), and its receipt lists the scales as a separate tensor."""

    name: str
    """Name of the scale tensor, of shape `ceil(shape / block)`; it is created at the target and is in no layout's
    `tensors`."""
    block: tuple[int, ...]
    """Block size in each dimension; the last block of a dimension may be shorter. For example (128, 128) for a
    matrix."""
    taken_as: str
    """Dtype of the weights before they are quantized: they are transferred in it, or in the source's dtype if that is
    narrower."""


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """A canonical tensor: name, full shape, and the dtype it is held in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: BlockScales | None = None
    """Rollout: `dtype` is `float8_e4m3fn`, and values are multiples of a scale for each block. A worker's boxes of such
    a tensor begin and end at block boundaries."""


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """What one rank holds (train) or needs (rollout). Plain data: it can be sent, printed and compared."""

    rank: int
    node: str
    """Equal on two ranks that can share memory."""
    device: str
    """`cpu` or `cuda:N`, as in `RankContext.device`. Before ranks are compared, N is replaced by the physical device's
    name (`RankContext.accelerators`): then ranks with equal `node` and `device` are on one device."""
    process: str
    """Equal on two ranks in one process (`node:pid`)."""
    tensors: tuple[TensorMeta, ...]
    """Every canonical tensor of which this rank has a part."""
    boxes: tuple[tuple[str, Box], ...]
    """Name and box of each part, in the order in which `shards()` yields them. Boxes of one rank do not overlap."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name of a tied tensor -> name under which the shared copy is held. Only the latter is in `tensors`. Every rank
    with a part of the shared copy lists it."""
    worker: str | None = None
    """Rollout: name of the engine's worker that receives these weights in its own process, `process`
    (`RolloutEngine.receive_weights`). None: the replica's process receives them (`update_weights`)."""
    host: str | None = None
    """Rollout: process of the replica of a worker. It fetches what the worker itself cannot, in place if it holds it.
    None: unknown."""
    is_apart: bool = False
    """True for a worker on another node than its replica's process: they share no memory. Replicas do not forward its
    weights, since forwarding goes through their processes."""


@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """A box of a canonical tensor, with its values."""

    name: str
    box: Box
    tensor: Tensor
    """Shape equals `box.size`. From a train engine: a view of its own memory (no copy, no gather), valid until the next
    call that changes weights. Into a rollout engine: valid until the next item is requested."""


FINGERPRINT_MODULUS = 2**32
"""Fingerprints of boxes are added modulo this."""
_CPU_CHUNK_ELEMENTS = 2**18
"""Elements widened to 32 bits at a time: fits into a CPU cache."""
_DEVICE_CHUNK_ELEMENTS = 2**24


def fingerprint(tensor: Tensor, box: Box) -> int:
    """An additive checksum of a box: the fingerprints of any boxes that tile a tensor sum to the tensor's.

    Sum over elements of bits(element) * product over dimensions d of weight(d, index[d]), modulo 2**32: the bit pattern
    as a signed integer (8-byte elements count as two of 4 bytes along one more dimension), `index` the element's place
    in the full tensor, `weight` odd and pseudo-random. It depends on values, dtype and position, not on how the tensor
    is split. A single changed element is always detected; any other change (rows swapped, a stale block) is missed with
    a probability near 2**-32, or 2**-16 if the low halves of all elements are zero. Costs about one memcpy of float32
    tensors, three of bfloat16 ones.

    Args:
        tensor: values of the box, any device, any dtype of 1, 2, 4 or 8 bytes.
        box: their position in the canonical tensor.

    Returns:
        0 <= fingerprint < 2**32; 0 for an empty box.
    """
    import torch

    if tensor.numel() == 0:
        return 0
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    if tensor.element_size() == 8:
        tensor = tensor.contiguous().unsqueeze(-1)
        box = Box((*box.offset, 0), (*box.size, 2))
    bits = (tensor.detach().view(torch.uint8) if tensor.dtype is torch.bool else tensor.detach()).view(width)
    for axis in reversed(range(bits.dim())):
        end = box.offset[axis] + box.size[axis]
        weights = _weights(axis, 1 << (end - 1).bit_length(), bits.device)[box.offset[axis] : end]
        bits = _contract(bits.reshape(-1, bits.shape[-1]), weights).reshape(bits.shape[:-1])
    return int(bits) % FINGERPRINT_MODULUS


@functools.lru_cache(maxsize=64)
def _weights(axis: int, size: int, device: torch.device) -> Tensor:
    """`[size]` int32, odd: the weight of each index of one dimension. `size` is a power of two, so that few are
    cached."""
    import torch

    index = torch.arange(1, size + 1, dtype=torch.int64) + (axis << 40)
    index = (index ^ (index >> 31)) * 0x7FB5D329728EA185
    index = (index ^ (index >> 27)) * 0x01DADEF4BC2DD44D
    return ((index >> 32).to(torch.int32) | 1).to(device)


def _contract(bits: Tensor, weights: Tensor) -> Tensor:
    """`[R, C]` integers times `[C]` int32, summed over C: `[R]` int32, wrapping."""
    import torch

    on_cpu = bits.device.type == "cpu"
    if on_cpu and bits.dtype is torch.int32:
        return torch.mv(bits, weights)
    rows = max(1, (_CPU_CHUNK_ELEMENTS if on_cpu else _DEVICE_CHUNK_ELEMENTS) // bits.shape[1])
    buffer = bits.new_empty((min(rows, len(bits)), bits.shape[1]), dtype=torch.int32)
    sums = []
    for part in torch.split(bits, rows):
        wide = buffer[: len(part)].copy_(part)
        # Integer matrix products exist on CPUs only.
        sums.append(torch.mv(wide, weights) if on_cpu else wide.mul_(weights).sum(1, dtype=torch.int32))
    return torch.cat(sums)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How one worker of a rollout engine receives the weights of an update, in its own process."""

    worker: str
    """`WeightLayout.worker`."""
    receiver: str
    """`package.module:function`. In the worker, `function(parcel)` yields each `WeightShard`, valid until the next is
    requested; it raises a WeightSyncError if the bytes are missing or damaged."""
    parcel: Mapping[str, Any]
    """Plain values (str, int, float, bool, bytes, lists and mappings of them) that say where the bytes come from.
    Tuples may arrive as lists."""


@dataclass(frozen=True, kw_only=True)
class WorkerReceipt:
    """What one worker received in an update."""

    worker: str
    num_tensors: int
    """Canonical tensors of which it holds a part."""
    num_bytes: int
    """Bytes of values, in the dtype they are sent in."""


@dataclass(frozen=True, kw_only=True)
class SyncReceipt:
    """Proof that a rollout engine serves the weights it was sent; one per replica and sync."""

    version: int
    """Policy version now served: optimizer steps contained in the weights."""
    num_tensors: int
    """Canonical tensors that arrived, tied copies not counted."""
    num_bytes: int
    """Bytes that arrived, in the dtype they are served in."""
    fingerprints: Mapping[str, int]
    """Canonical name -> `fingerprint` of the weights now served. The engine computes it after loading, over its own
    memory (not over the received data). It may name more tensors, such as tied copies; they are not compared."""
    seconds: float = 0.0
    workers: tuple[WorkerReceipt, ...] = ()
    """For an engine whose workers received the weights themselves, one per worker. Boxes that several workers hold were
    compared."""
    effect: float | None = None
    """Of an adapter: the largest difference that it makes to the logits of a probe, some fixed tokens, computed by the
    engine as it serves. 0: it changes nothing. None: not measured."""
    engine_checksum: str | None = None
    """The engine's own checksum of everything that it computes from, if it has one and it was requested. Compared
    between replicas that serve the same boxes and have one; only the engine can compute it."""
    pause_s: float | None = None
    """Seconds of `seconds` in which the replica could not decode. Measured by the host; None: not measured."""
