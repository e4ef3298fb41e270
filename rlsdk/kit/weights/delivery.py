"""Weights that the workers of a rollout engine receive themselves: both ends of `RolloutEngine.receive_weights`.

The replica's process calls `encode_deliveries` and sends the result to its workers, however the engine calls them. Each
worker calls `receive_shards`, and the replica's process passes the answers to `worker_receipts`. Only plain values are
sent.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlsdk.interfaces import Box, Delivery, WeightShard, WeightSyncError, WorkerReceipt
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.kit.weights.weight_tracing import Piece
from rlsdk.kit.weights.weight_updates import write_shard

Pieces = Mapping[str, Sequence[Piece]]


def encode_deliveries(deliveries: Sequence[Delivery]) -> list[list[Any]]:
    """Deliveries as plain values: [worker, receiver, parcel] of each."""
    return [[delivery.worker, delivery.receiver, dict(delivery.parcel)] for delivery in deliveries]


def describe_worker(worker: str, process: int, pieces: Pieces) -> dict[str, Any]:
    """The boxes that a worker holds, as plain values, for `rlsdk.kit.generation.serving.worker_layouts`."""
    boxes = [
        [name, box.offset, box.size, dtype]
        for name, parts in pieces.items()
        for box, dtype in {p.box: str(p.memory.dtype).removeprefix("torch.") for p in parts}.items()
    ]
    devices = {str(piece.memory.device) for parts in pieces.values() for piece in parts}
    return {"worker": worker, "process": process, "device": min(devices, default="cpu"), "boxes": boxes}


def receive_shards(worker: str, deliveries: Sequence[Sequence[Any]], pieces: Pieces) -> dict[str, Any]:
    """Called in a worker: receives its delivery, and writes it into the memory that the worker serves from.

    Args:
        worker: name of this worker.
        deliveries: result of `encode_deliveries`.
        pieces: canonical tensor -> the pieces of it that this worker holds.

    Returns:
        The answer, for `worker_receipts`. Errors are part of the answer and not raised, as engines differ in what they
        do if a worker raises.
    """
    try:
        receiver, parcel = next((receiver, parcel) for name, receiver, parcel in deliveries if name == worker)
        module, _, function = receiver.partition(":")
        shards: Iterator[WeightShard] = getattr(importlib.import_module(module), function)(parcel)
        num_bytes = 0
        # Engines call from inference mode, whose tensors could not be used again outside of it.
        with torch.inference_mode(False):
            for shard in check_shards(shards, pieces):
                write_shard(pieces[shard.name], shard)
                num_bytes += shard.tensor.nbytes
    except Exception as error:
        return {"worker": worker, "error": f"{type(error).__name__}: {error}", "closed": _is_attach_error(error)}
    return {"worker": worker, "num_tensors": sum(map(bool, pieces.values())), "num_bytes": num_bytes}


def _is_attach_error(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, AttachError) or _is_attach_error(error.__cause__))


def check_shards(shards: Iterator[WeightShard], pieces: Pieces) -> Iterator[WeightShard]:
    """Yields the shards for one worker one at a time, each after its check.

    Raises:
        WeightSyncError: a shard is not part of what the worker holds, or overlaps another; or, after the last shard,
            something that the worker holds is not covered.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in pieces}
    for shard in shards:
        fits = any(piece.box.intersect(shard.box) == shard.box for piece in pieces.get(shard.name, ()))
        if not fits or tuple(shard.tensor.shape) != shard.box.size:
            raise WeightSyncError(
                f"{shard.name!r} at {list(shard.box.offset)} of size {list(shard.box.size)} is not a part of what this "
                "worker holds"
            )
        if any(box.intersect(shard.box) is not None for box in boxes[shard.name]):
            raise WeightSyncError(f"{shard.name!r} at {list(shard.box.offset)} arrived twice")
        boxes[shard.name].append(shard.box)
        yield shard
    for name, parts in pieces.items():
        held = sum(box.numel for box in {piece.box for piece in parts})
        if sum(box.numel for box in boxes[name]) < held:
            raise WeightSyncError(f"{name!r} is incomplete: an update must cover every box of layout()")


def worker_receipts(answers: Sequence[Mapping[str, Any]], version: int) -> tuple[WorkerReceipt, ...]:
    """Receipts from the workers' answers.

    Raises:
        AttachError: all errors are that a worker cannot map the memory of its source; another transport may work.
        WeightSyncError: a worker did not receive its weights.
    """
    failed = [answer for answer in answers if "error" in answer]
    for answer in failed:
        kind = AttachError if all(other["closed"] for other in failed) else WeightSyncError
        raise kind(f"version {version}: worker {answer['worker']!r} did not load its weights: {answer['error']}")
    return tuple(
        WorkerReceipt(worker=a["worker"], num_tensors=a["num_tensors"], num_bytes=a["num_bytes"]) for a in answers
    )
