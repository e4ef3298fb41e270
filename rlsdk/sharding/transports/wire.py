"""Wire format: bytes, whose dtype and shape both ends know from the plan, a version and checksums. No pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlsdk.interfaces import DTYPE_BYTES, WeightShard, WeightSyncError
from rlsdk.sharding.transports.transport import Outgoing

WIRE_VERSION = 4
"""Version of the protocol; ends of different versions refuse each other."""
MAX_BUCKET_BYTES = 1 << 32
"""Largest bucket in bytes: a larger one is refused before memory is allocated."""
ALIGNMENT = 64
"""Alignment of every tensor of a bucket: a cache line, and a multiple of the element size of any dtype."""
GROUP_BYTES = 1 << 20
"""Bytes that are copied and checked at once: they fit in the second-level cache."""

Metas: TypeAlias = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor."""


def announcement(num_bytes: int, checksums: Sequence[int] = ()) -> dict[str, Any]:
    """The part of a bucket's handle that all transports share. If bytes are streamed, each checksum is sent with its
    bytes instead."""
    return {"wire_version": WIRE_VERSION, "num_bytes": num_bytes, "checksums": list(checksums)}


def check_announcement(handle: Mapping[str, Any], metas: Metas) -> int:
    """Bytes of the requested bucket.

    Raises:
        WeightSyncError: the source uses another version, or announces other bytes than requested.
    """
    if handle.get("wire_version") != WIRE_VERSION:
        raise WeightSyncError(
            f"the source speaks version {handle.get('wire_version')} of the wire, this end version {WIRE_VERSION}: "
            "run the same rlsdk on both sides"
        )
    _, num_bytes = bucket_offsets(metas)
    if handle["num_bytes"] != num_bytes:
        raise WeightSyncError(
            f"a bucket of {num_bytes} bytes was asked for, but the source announced {handle['num_bytes']}"
        )
    if num_bytes > MAX_BUCKET_BYTES:
        raise WeightSyncError(f"a bucket of {num_bytes} bytes is over the limit of {MAX_BUCKET_BYTES}: make it smaller")
    return num_bytes


def checksum(data: Tensor) -> int:
    """Sum of `[n]` uint8 data as 64-bit integers (n a multiple of 64): detects torn, stale and overwritten bytes at
    half the cost of a memcpy. Fingerprints check that every element is in its place."""
    return int(data.view(torch.int64).sum())


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bucket_offsets(metas: Metas) -> tuple[list[int], int]:
    """Offset of each tensor, and the total number of bytes including gaps."""
    offsets, end = [], 0
    for shape, dtype in metas:
        offsets.append(end)
        size = DTYPE_BYTES[dtype]
        for n in shape:
            size *= n
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def slots(data: Tensor, offsets: Sequence[int], metas: Metas) -> list[Tensor]:
    """One view per tensor into `data`, which starts with the first tensor."""
    views = []
    first = offsets[0] if offsets else 0
    for offset, (shape, dtype) in zip(offsets, metas, strict=True):
        start = offset - first
        numel = torch.Size(shape).numel()
        views.append(data[start : start + numel * DTYPE_BYTES[dtype]].view(_dtype(dtype)).view(shape))
    return views


def groups(offsets: Sequence[int], num_bytes: int, group_bytes: int = GROUP_BYTES) -> list[tuple[slice, slice]]:
    """(tensors, bytes) of the groups that are copied and checked together: as many tensors as fit in `group_bytes`, or
    one larger tensor."""
    found, first = [], 0
    for at, end in enumerate([*offsets[1:], num_bytes], start=1):
        after = offsets[at + 1] if at + 1 < len(offsets) else num_bytes
        if at == len(offsets) or after - offsets[first] > group_bytes:
            found.append((slice(first, at), slice(offsets[first], end)))
            first = at
    return found


@torch.no_grad()
def fill_group(data: Tensor, offsets: Sequence[int], shards: Sequence[WeightShard], dtypes: Sequence[str]) -> int:
    """Copies and converts the shards of one group in one multi-tensor call; returns its checksum, computed while the
    group is in the cache."""
    metas = [(shard.box.size, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
    torch._foreach_copy_(slots(data, offsets, metas), [shard.tensor for shard in shards])
    return checksum(data)


def fill(data: Tensor, offsets: Sequence[int], shards: Sequence[WeightShard], dtypes: Sequence[str]) -> list[int]:
    """Fills a whole bucket; returns the checksum of each group."""
    return [
        fill_group(data[span], offsets[tensors], shards[tensors], dtypes[tensors])
        for tensors, span in groups(offsets, len(data))
    ]


def filled(bucket: Outgoing) -> tuple[Tensor, list[int]]:
    """(new memory with all bytes of a bucket, the checksum of each group)."""
    offsets, num_bytes = bucket_offsets(bucket.metas)
    data = torch.empty(num_bytes, dtype=torch.uint8)
    return data, fill(data, offsets, bucket.take(), bucket.dtypes)


def checked(data: Tensor, handle: Mapping[str, Any], metas: Metas) -> Iterator[Tensor]:
    """Views of a bucket's tensors; each group is checked when the reader of its tensors requests more: its bytes are
    then in the cache, and an overwrite during reading is detected too."""
    num_bytes = check_announcement(handle, metas)
    if len(data) < num_bytes:
        raise WeightSyncError(f"a bucket of {num_bytes} bytes was asked for, but only {len(data)} arrived")
    return _give(data, metas, handle["checksums"])


def _give(data: Tensor, metas: Metas, sums: Sequence[int]) -> Iterator[Tensor]:
    offsets, num_bytes = bucket_offsets(metas)
    for (tensors, span), sent in zip(groups(offsets, num_bytes), sums, strict=True):
        yield from slots(data[span], offsets[tensors], metas[tensors])
        check_group(data[span], sent)


def check_group(data: Tensor, sent: int) -> None:
    """Raises `WeightSyncError` unless the bytes have the checksum that the source sent."""
    found = checksum(data)
    if found != sent:
        raise WeightSyncError(
            f"{len(data)} bytes of a bucket arrived with checksum {found}, the source sent {sent}: "
            "they were overwritten or corrupted on the way"
        )
