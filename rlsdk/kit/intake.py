"""Loading weights into the engine's memory, and proving what arrived there."""

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
from rlsdk.kit.tracing import Piece

Boxes = Mapping[str, Sequence[tuple[Sequence[int], Sequence[int]]]]
"""By tensor, of each box that a worker serves: where it starts, its size. Plain values, as in `staging.Entry`."""
Fingerprints = Mapping[str, Sequence[tuple[Sequence[int], Sequence[int], int]]]
"""As `Boxes`, and its fingerprint."""


class Intake:
    """One update under way: checks every shard, and knows what is still lacking."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        self.shapes = shapes
        self.version = version
        self._came: dict[str, list[Box]] = {name: [] for name in shapes}

    def accept(self, shard: WeightShard) -> None:
        """Raises: WeightSyncError: it is unknown, does not fit, or came before."""
        shape = self.shapes.get(shard.name)
        if shape is None:
            raise WeightSyncError(
                f"version {self.version}: {shard.name!r} is no tensor of this model"
                f"{nearest(shard.name, self.shapes)}; it has {len(self.shapes)}, those of layout()"
            )
        fits = len(shard.box.size) == len(shape) and shard.box.intersect(Box.whole(shape)) == shard.box
        if not fits or tuple(shard.tensor.shape) != shard.box.size:
            raise WeightSyncError(
                f"version {self.version}: {shard.name!r} has shape {list(shape)}; a piece came at "
                f"{list(shard.box.offset)} of size {list(shard.box.size)}, with values of shape "
                f"{list(shard.tensor.shape)}"
            )
        again = next((box for box in self._came[shard.name] if box.intersect(shard.box) is not None), None)
        if again is not None:
            raise WeightSyncError(
                f"version {self.version}: {shard.name!r}: the piece at {list(shard.box.offset)} of size "
                f"{list(shard.box.size)} overlaps the one at {list(again.offset)} of size {list(again.size)}"
            )
        self._came[shard.name].append(shard.box)

    def finish(self) -> None:
        """Raises: WeightSyncError: not all of the model came."""
        lacking = sorted(
            name
            for name, shape in self.shapes.items()
            if sum(box.numel for box in self._came[name]) < Box.whole(shape).numel
        )
        if lacking:
            raise WeightSyncError(
                f"version {self.version}: {len(lacking)} of {len(self.shapes)} tensors were not covered, first "
                f"{lacking[0]!r}; an update brings every box of layout()"
            )


@torch.no_grad()
def write_shard(pieces: Sequence[Piece], shard: WeightShard) -> None:
    """Copies what the pieces hold of a shard to its place, converting its dtype."""
    for piece in pieces:
        common = piece.box.intersect(shard.box)
        if common is not None:
            piece.memory[common.slices(piece.box)].copy_(shard.tensor[common.slices(shard.box)])


def boxes(pieces: Mapping[str, Sequence[Piece]]) -> Boxes:
    """All that a worker serves."""
    return {name: [(piece.box.offset, piece.box.size) for piece in parts] for name, parts in pieces.items()}


def fingerprints(pieces: Mapping[str, Sequence[Piece]]) -> Fingerprints:
    """Of each box that a worker serves, over the memory that serves it."""
    return {
        name: [(piece.box.offset, piece.box.size, fingerprint(piece.memory, piece.box)) for piece in parts]
        for name, parts in pieces.items()
    }


def receipt(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    served: Sequence[Fingerprints],
    version: int,
    workers: tuple[WorkerReceipt, ...] = (),
) -> SyncReceipt:
    """Of an update that is in its place.

    Args:
        shapes: of the canonical tensors.
        dtype: that they are served in.
        served: by worker.
        version: what the engine serves now.
        workers: what each received, where they took their own parts.

    Raises:
        WeightSyncError: two workers serve different values of one box.
    """
    found = joined(served, version)
    return SyncReceipt(
        version=version,
        num_tensors=len(found),
        num_bytes=sum(map(math.prod, shapes.values())) * DTYPE_BYTES[dtype],
        fingerprints=found,
        workers=workers,
    )


def checked(
    shapes: Mapping[str, tuple[int, ...]], shards: Iterable[WeightShard], version: int
) -> Iterator[WeightShard]:
    """The shards of a whole update, one at a time.

    Raises:
        WeightSyncError: a shard does not fit, or, after the last, not all came.
    """
    intake = Intake(shapes, version)
    for shard in shards:
        intake.accept(shard)
        yield shard
    intake.finish()


def unserved(shapes: Mapping[str, tuple[int, ...]], workers: Sequence[Boxes]) -> list[str]:
    """Tensors of which no worker serves some part."""
    served: dict[str, set[Box]] = {name: set() for name in shapes}
    for worker in workers:
        for name, boxes in worker.items():
            served[name].update(Box(tuple(start), tuple(size)) for start, size in boxes)
    return [name for name, shape in shapes.items() if sum(b.numel for b in served[name]) < Box.whole(shape).numel]


def joined(workers: Sequence[Fingerprints], version: int) -> dict[str, int]:
    """Fingerprint of each tensor, out of those of the boxes that the workers serve. What several hold counts once.

    Raises:
        WeightSyncError: two workers serve different values of one box.
    """
    found: dict[str, dict[Box, int]] = {}
    for rank, worker in enumerate(workers):
        for name, boxes in worker.items():
            for start, size, value in boxes:
                box = Box(tuple(start), tuple(size))
                if found.setdefault(name, {}).setdefault(box, value) != value:
                    raise WeightSyncError(
                        f"version {version}: worker {rank} serves other values of {name!r} at {list(box.offset)} than "
                        "a worker before it: their copies have come apart"
                    )
    return {name: sum(boxes.values()) % FINGERPRINT_MODULUS for name, boxes in found.items()}
