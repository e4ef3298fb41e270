"""Updates of a rollout engine's weights: checks what arrives, writes it, and makes the receipt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from rlsdk.interfaces import (
    DTYPE_BYTES,
    FINGERPRINT_MODULUS,
    Box,
    SyncReceipt,
    WeightShard,
    WeightSyncError,
    WorkerReceipt,
    fingerprint,
    nearest,
)
from rlsdk.kit.weights.weight_tracing import Piece

Boxes = Mapping[str, Sequence[tuple[Sequence[int], Sequence[int]]]]
"""Tensor -> (offset, size) of each box that a worker serves. Plain values, as in `staging.Entry`."""
Fingerprints = Mapping[str, Sequence[tuple[Sequence[int], Sequence[int], int]]]
"""Tensor -> (offset, size, fingerprint) of each box that a worker serves."""


class UpdateCheck:
    """Checks the shards of one update, and that together they cover every tensor."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        self.shapes = shapes
        self.version = version
        self._boxes: dict[str, list[Box]] = {name: [] for name in shapes}

    def accept(self, shard: WeightShard) -> None:
        """Checks one shard.

        Raises:
            WeightSyncError: its tensor is unknown, its box or shape does not fit, or it overlaps an earlier shard.
        """
        shape = self.shapes.get(shard.name)
        if shape is None:
            raise WeightSyncError(
                f"version {self.version}: {shard.name!r} is not a tensor of this model"
                f"{nearest(shard.name, self.shapes)}; it has {len(self.shapes)}, those of layout()"
            )
        fits = len(shard.box.size) == len(shape) and shard.box.intersect(Box.whole(shape)) == shard.box
        if not fits or tuple(shard.tensor.shape) != shard.box.size:
            raise WeightSyncError(
                f"version {self.version}: {shard.name!r} has shape {list(shape)}; a piece arrived at "
                f"{list(shard.box.offset)} of size {list(shard.box.size)}, with values of shape "
                f"{list(shard.tensor.shape)}"
            )
        again = next((box for box in self._boxes[shard.name] if box.intersect(shard.box) is not None), None)
        if again is not None:
            raise WeightSyncError(
                f"version {self.version}: {shard.name!r}: the piece at {list(shard.box.offset)} of size "
                f"{list(shard.box.size)} overlaps the one at {list(again.offset)} of size {list(again.size)}"
            )
        self._boxes[shard.name].append(shard.box)

    def finish(self) -> None:
        """Checks that the update is complete.

        Raises:
            WeightSyncError: some tensor is not covered.
        """
        lacking = sorted(
            name
            for name, shape in self.shapes.items()
            if sum(box.numel for box in self._boxes[name]) < Box.whole(shape).numel
        )
        if lacking:
            raise WeightSyncError(
                f"version {self.version}: {len(lacking)} of {len(self.shapes)} tensors were not covered, first "
                f"{lacking[0]!r}; an update must cover every box of layout()"
            )


@torch.no_grad()
def write_shard(pieces: Sequence[Piece], shard: WeightShard) -> None:
    """Copies a shard into the pieces of memory that overlap it, converting its dtype."""
    for piece in pieces:
        common = piece.box.intersect(shard.box)
        if common is not None:
            piece.memory[common.slices(piece.box)].copy_(shard.tensor[common.slices(shard.box)])


def served_boxes(pieces: Mapping[str, Sequence[Piece]]) -> Boxes:
    """The boxes that a worker serves."""
    return {name: [(piece.box.offset, piece.box.size) for piece in parts] for name, parts in pieces.items()}


def served_fingerprints(pieces: Mapping[str, Sequence[Piece]]) -> Fingerprints:
    """Fingerprints of the boxes that a worker serves, computed over the memory that it serves from."""
    return {
        name: [(piece.box.offset, piece.box.size, fingerprint(piece.memory, piece.box)) for piece in parts]
        for name, parts in pieces.items()
    }


def make_receipt(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    served: Sequence[Fingerprints],
    version: int,
    workers: tuple[WorkerReceipt, ...] = (),
) -> SyncReceipt:
    """The receipt of a finished update.

    Args:
        shapes: shapes of the canonical tensors.
        dtype: dtype in which they are served.
        served: fingerprints that each worker serves.
        version: the version that the engine serves now.
        workers: what each worker received, if workers receive their own parts.

    Raises:
        WeightSyncError: two workers serve different values of one box.
    """
    fingerprints = join_fingerprints(served, version)
    return SyncReceipt(
        version=version,
        num_tensors=len(fingerprints),
        num_bytes=sum(map(math.prod, shapes.values())) * DTYPE_BYTES[dtype],
        fingerprints=fingerprints,
        workers=workers,
    )


def check_shards(
    shapes: Mapping[str, tuple[int, ...]], shards: Iterable[WeightShard], version: int
) -> Iterator[WeightShard]:
    """Yields the shards of an update one at a time, each after its check.

    Raises:
        WeightSyncError: a shard does not fit, or, after the last shard, some tensor is not covered.
    """
    check = UpdateCheck(shapes, version)
    for shard in shards:
        check.accept(shard)
        yield shard
    check.finish()


def gathered(
    shapes: Mapping[str, tuple[int, ...]], shards: Iterable[WeightShard], dtype: str
) -> dict[str, torch.Tensor]:
    """Small tensors, copied whole from their shards into main memory."""
    found = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()}
    for shard in shards:
        whole = Box.whole(shapes[shard.name])
        found[shard.name][shard.box.slices(whole)] = shard.tensor.detach().to("cpu", found[shard.name].dtype)
    return found


def find_unserved(shapes: Mapping[str, tuple[int, ...]], workers: Sequence[Boxes]) -> list[str]:
    """Names of the tensors that the workers together do not serve completely."""
    served: dict[str, set[Box]] = {name: set() for name in shapes}
    for worker in workers:
        for name, boxes in worker.items():
            served[name].update(Box(tuple(start), tuple(size)) for start, size in boxes)
    return [name for name, shape in shapes.items() if sum(b.numel for b in served[name]) < Box.whole(shape).numel]


def join_fingerprints(workers: Sequence[Fingerprints], version: int) -> dict[str, int]:
    """Fingerprint of each tensor, joined from those of its boxes; a box that several workers serve counts once.

    Raises:
        WeightSyncError: two workers serve different values of one box.
    """
    joined: dict[str, dict[Box, int]] = {}
    for rank, worker in enumerate(workers):
        for name, boxes in worker.items():
            for start, size, value in boxes:
                box = Box(tuple(start), tuple(size))
                if joined.setdefault(name, {}).setdefault(box, value) != value:
                    raise WeightSyncError(
                        f"version {version}: worker {rank} serves other values of {name!r} at {list(box.offset)} than "
                        "an earlier worker: their copies have diverged"
                    )
    return {name: sum(boxes.values()) % FINGERPRINT_MODULUS for name, boxes in joined.items()}
