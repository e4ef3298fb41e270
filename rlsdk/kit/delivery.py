"""Weights that a worker of a rollout engine receives itself: both ends of `RolloutEngine.receive_weights`.

The replica's process calls `packed` and gives the outcome to its workers, in whichever way the engine calls them; each
worker calls `taken`; the replica's process gives the answers to `receipts`. All that crosses is plain values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlsdk.interfaces import Box, Delivery, WeightShard, WeightSyncError, WorkerReceipt
from rlsdk.kit.intake import write_shard
from rlsdk.kit.shared_memory import AttachError
from rlsdk.kit.tracing import Piece

Pieces = Mapping[str, Sequence[Piece]]


def packed(deliveries: Sequence[Delivery]) -> list[list[Any]]:
    """Deliveries as plain values."""
    return [[delivery.worker, delivery.receiver, dict(delivery.parcel)] for delivery in deliveries]


def described(worker: str, process: int, pieces: Pieces) -> dict[str, Any]:
    """What a worker holds, as plain values, for `rlsdk.kit.serving.worker_layouts`."""
    boxes = [
        [name, box.offset, box.size, dtype]
        for name, parts in pieces.items()
        for box, dtype in {p.box: str(p.memory.dtype).removeprefix("torch.") for p in parts}.items()
    ]
    devices = {str(piece.memory.device) for parts in pieces.values() for piece in parts}
    return {"worker": worker, "process": process, "device": min(devices, default="cpu"), "boxes": boxes}


def taken(worker: str, deliveries: Sequence[Sequence[Any]], pieces: Pieces) -> dict[str, Any]:
    """In a worker: takes what is for it into the memory that serves.

    Args:
        worker: its name.
        deliveries: of `packed`.
        pieces: of each canonical tensor, those that this worker holds.

    Returns:
        For `receipts`. An error is part of it: engines differ in what they do with a worker that raises.
    """
    try:
        receiver, parcel = next((receiver, parcel) for name, receiver, parcel in deliveries if name == worker)
        module, _, function = receiver.partition(":")
        shards: Iterator[WeightShard] = getattr(importlib.import_module(module), function)(parcel)
        num_bytes = 0
        # Engines call from inference mode, whose tensors could not be used again outside of it.
        with torch.inference_mode(False):
            for shard in whole(shards, pieces):
                write_shard(pieces[shard.name], shard)
                num_bytes += shard.tensor.nbytes
    except Exception as error:
        return {"worker": worker, "error": f"{type(error).__name__}: {error}", "closed": _is_closed_way(error)}
    return {"worker": worker, "num_tensors": sum(map(bool, pieces.values())), "num_bytes": num_bytes}


def _is_closed_way(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, AttachError) or _is_closed_way(error.__cause__))


def whole(shards: Iterator[WeightShard], pieces: Pieces) -> Iterator[WeightShard]:
    """The shards of an update of one worker, one at a time.

    Raises:
        WeightSyncError: one is of what the worker does not hold or overlaps another, or, after the last, not all of
            what it holds has come.
    """
    came: dict[str, list[Box]] = {name: [] for name in pieces}
    for shard in shards:
        fits = any(piece.box.intersect(shard.box) == shard.box for piece in pieces.get(shard.name, ()))
        if not fits or tuple(shard.tensor.shape) != shard.box.size:
            raise WeightSyncError(
                f"{shard.name!r} at {list(shard.box.offset)} of size {list(shard.box.size)} is no part of what this "
                "worker holds"
            )
        if any(box.intersect(shard.box) is not None for box in came[shard.name]):
            raise WeightSyncError(f"{shard.name!r} at {list(shard.box.offset)} came twice")
        came[shard.name].append(shard.box)
        yield shard
    for name, parts in pieces.items():
        held = sum(box.numel for box in {piece.box for piece in parts})
        if sum(box.numel for box in came[name]) < held:
            raise WeightSyncError(f"{name!r} did not come whole: an update brings every box of layout()")


def receipts(answers: Sequence[Mapping[str, Any]], version: int) -> tuple[WorkerReceipt, ...]:
    """Of the workers' answers.

    Raises:
        AttachError: a worker cannot open the memory of its source; another way may be open.
        WeightSyncError: a worker did not get its weights.
    """
    failed = [answer for answer in answers if "error" in answer]
    for answer in failed:
        kind = AttachError if all(other["closed"] for other in failed) else WeightSyncError
        raise kind(f"version {version}: worker {answer['worker']!r} did not take its weights: {answer['error']}")
    return tuple(
        WorkerReceipt(worker=a["worker"], num_tensors=a["num_tensors"], num_bytes=a["num_bytes"]) for a in answers
    )
