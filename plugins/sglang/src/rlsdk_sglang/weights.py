"""Weights of one SGLang scheduler process: executes commands from the engine's process.

Everything here depends on SGLang's version. Tested: 0.5.23.
"""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from rlsdk.kit.memory.offload import ReleasedMemory
from rlsdk.kit.weights import delivery, weight_updates
from rlsdk.kit.weights.staging import attached, copied
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk.kit.weights.weight_tracing import Piece, trace_loaders
from rlsdk.kit.weights.weight_updates import Boxes, Fingerprints, write_shard
from rlsdk_sglang import derived, low_rank, scheduler_process
from rlsdk_sglang.messages import Command

LOADER = "rlsdk_sglang.weights.run_command"
"""Name under which SGLang calls `run_command`, as a custom weight loader."""
NAME = uuid.uuid4().hex
"""Name of this process as a worker that receives its own part of an update."""


def run_command(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Executes a command. Returns errors as the answer: in SGLang an exception here would end the process."""
    for _, tensor in named_tensors:
        command = Command.decoded(tensor.cpu().numpy().tobytes())
        value, error = None, None
        try:
            along = {"data": command.data} if command.data else {}
            value = getattr(WeightCommands(model), command.name)(**command.arguments, **along)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        # A caller on another machine, or one that has ended, gets no answer; it reports that itself.
        with suppress(OSError):
            command.answer(value, error, stage=stage())


def stage() -> int:
    """Pipeline stage of this process."""
    from sglang.srt.runtime_context import get_parallel

    rank: int = get_parallel().pp_rank
    return rank


class WeightCommands:
    """The commands, as methods."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, shapes: dict[str, list[int]], sources: list[Any] | None) -> list[str]:
        """Finds where each canonical tensor is stored; returns reasons why weights cannot be replaced and verified.

        Args:
            shapes: shapes of the canonical tensors.
            sources: the tensors to give to SGLang's loaders, if the files have other ones (`Source.packed`).
        """
        files = None if sources is None else [Source.unpacked(values) for values in sources]
        pieces = trace_loaders(self.model.load_weights, shapes, files)
        PIECES.clear()
        PIECES.update(pieces)
        # On a CPU SGLang collects garbage whenever it flushes a cache, several times in each update. Existing objects
        # stay alive, so they are excluded from collection.
        gc.collect()
        gc.freeze()
        return faults(self.model, pieces)

    def boxes(self) -> Boxes:
        """The boxes that this process serves."""
        return weight_updates.served_boxes(PIECES)

    def describe(self) -> dict[str, Any]:
        """Description of this process and its boxes."""
        return delivery.describe_worker(NAME, os.getpid(), PIECES)

    def receive(self, deliveries: list[Any]) -> dict[str, Any]:
        """Receives this process's part of an update from its source."""
        return delivery.receive_shards(NAME, deliveries, PIECES)

    def write(self, block: list[int], entries: list[Any]) -> None:
        """Copies weights from memory that the engine's process filled; skips what this process does not hold."""
        process, descriptor, num_bytes = block
        with attached((process, descriptor, num_bytes), entries) as shards:
            for shard in shards:
                write_shard(PIECES[shard.name], shard)

    def write_copy(self, data: bytes, entries: list[Any]) -> None:
        """As `write`, on another node: the values are sent with the command."""
        for shard in copied(data, entries):
            write_shard(PIECES[shard.name], shard)

    def rebuild(self) -> None:
        """Recomputes tensors that the model derives from weights, once all weights have arrived."""
        derived.rebuild(self.model)

    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the boxes that this process serves, over the memory that it serves from; checks derived
        tensors."""
        derived.check(self.model)
        return weight_updates.served_fingerprints(PIECES)

    def adapter(self, adapter: str, spec: dict[str, Any], shapes: dict[str, list[int]]) -> Fingerprints:
        """Fingerprints of an adapter's tensors, over the slot that this process computes with."""
        return low_rank.held(scheduler_process.RUNNERS[0].lora_manager, adapter, spec, shapes)

    def release(self, parts: list[str]) -> int:
        """Frees memory on a CPU; returns the number of bytes."""
        tensors = {part: self.tensors(part) for part in parts}
        num_bytes = sum(_bytes_of(found) for found in tensors.values())
        for part, found in tensors.items():
            RELEASED[part].release(found)
        return num_bytes - sum(_bytes_of(found) for found in tensors.values())

    def restore(self, parts: list[str]) -> None:
        for part in parts:
            RELEASED[part].restore()

    def tensors(self, part: str) -> list[Tensor]:
        if part == "weights":
            return [piece.memory for parts in PIECES.values() for piece in parts]
        pool = scheduler_process.RUNNERS[0].token_to_kv_pool
        # Latent attention has one tensor per layer for keys and values.
        return [*pool.kv_buffer] if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


PIECES: dict[str, list[Piece]] = {}
"""Pieces of the model of this process."""
RELEASED = {"weights": ReleasedMemory(), "kv_cache": ReleasedMemory()}


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def faults(model: nn.Module, pieces: dict[str, list[Piece]]) -> list[str]:
    """Reasons why the pieces are not everything that is served: parameters that the engine repacked, or that no
    canonical tensor maps to. Another process may hold a tensor of which this one has nothing: the caller checks that
    over all processes."""
    found: list[str] = []
    reached = {piece.memory.untyped_storage().data_ptr() for parts in pieces.values() for piece in parts}
    live = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        live.add(parameter.untyped_storage().data_ptr())
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in reached:
            found.append(f"no canonical tensor maps to the engine's parameter {name!r}, or it was repacked")
    for name, parts in pieces.items():
        if any(piece.memory.untyped_storage().data_ptr() not in live for piece in parts):
            found.append(f"the engine repacked canonical tensor {name!r} after loading it")
    for name, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            found.append(f"layer {name!r} computes from a packed copy of its weights")
    return found
