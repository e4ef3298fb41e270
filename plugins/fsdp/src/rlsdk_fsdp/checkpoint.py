"""Checkpoints of a sharded engine: torch's distributed checkpoint in safetensors files, and a small JSON file.

torch's default storage keeps its index as a pickle, which this project never loads. Its Hugging Face storage puts the
location of each shard into the safetensors header instead, and needs no index. Planning, balancing over replicas,
resharding and raising errors on every rank are done by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from rlsdk.interfaces import CheckpointError
from rlsdk.kit.files import engine_progress
from rlsdk.kit.files.engine_progress import STATE, read_progress, write_progress
from rlsdk.kit.model.adapters import check_base
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks
from rlsdk.kit.ranks.random_states import random_states, set_random_states
from rlsdk_fsdp.shards import Piece

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, with the shape of a parameter; it also counts steps."""


@dataclass(frozen=True, kw_only=True)
class Progress(engine_progress.Progress):
    """Content of a checkpoint besides tensors."""

    adam_steps: Mapping[str, float]
    """Name -> AdamW's step count; parameters without any gradient so far have none."""


def save(
    folder: Path,
    pieces: Iterable[Piece],
    optimizer: torch.optim.Optimizer | None,
    num_steps: int,
    *,
    base: str | None = None,
    reference: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Writes weights, moments, schedule and random states. Collective: every rank must call; returns when all files are
    on disk.

    Args:
        folder: an empty one.
        pieces: of what is trained.
        optimizer: None: the model is frozen.
        num_steps: of the schedule.
        base: fingerprint of the frozen weights below an adapter; None: there are none.
        reference: this rank's values of the adapter that the reference has; empty: it has none.

    Raises:
        CheckpointError: some rank could not write; raised on all.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for piece in pieces:
        tensors[f"weight/{piece.name}"] = piece.like(piece.held.detach())
        state = optimizer.state.get(piece.held) if optimizer is not None else None
        if state:
            steps[piece.name] = float(state["step"])
            tensors |= {f"{moment}/{piece.name}": piece.like(state[moment]) for moment in MOMENTS}
        if reference:
            tensors[f"reference/{piece.name}"] = piece.like(reference[piece.name])
    tensors |= {_random_key(device, rank): state for device, state in random_states().items()}
    try:
        save_distributed(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be written: {_first_line(error)}") from error
    progress = Progress(
        num_steps=num_steps, world_size=world_size, base=base, has_reference=bool(reference), adam_steps=steps
    )
    with raise_on_all_ranks(f"{folder} cannot be written"):
        if rank == 0:
            write_progress(folder, progress)


def load(
    folder: Path, pieces: Iterable[Piece], optimizer: torch.optim.Optimizer | None, *, base: str | None = None
) -> tuple[int, dict[str, Tensor]]:
    """Restores what `save` wrote, on any number of ranks; returns `num_steps` and `reference`. Collective: every rank
    must call.

    Rank r gets the random state of rank r; ranks beyond those of the saving run keep their own. `base` is that of this
    model.

    Raises:
        CheckpointError: the folder is incomplete or of another model; raised on all ranks, which keep their state
            unless a file could not be read to its end.
    """
    pieces = list(pieces)
    reader = _Reader(str(folder))
    with raise_on_all_ranks(f"{folder} cannot be loaded"):
        progress = read_progress(folder, "fsdp", _progress_of)
        check_base(folder, progress.base, base)
        if dist.get_rank() == 0:
            reader.read_headers()
    reader.share()
    with raise_on_all_ranks(f"{folder} cannot be loaded"):
        metadata = reader.read_metadata()
        _check_fit(folder, metadata, pieces, progress, moments=optimizer is not None)
        _check_moments(folder, metadata, progress)
    tensors = {f"weight/{piece.name}": piece.like(piece.held.detach()) for piece in pieces}
    if optimizer is not None:
        tensors |= _fresh_moments(optimizer, pieces, progress.adam_steps)
    reference = {piece.name: torch.zeros_like(piece.held) for piece in pieces if progress.has_reference}
    tensors |= {f"reference/{piece.name}": piece.like(reference[piece.name]) for piece in pieces if reference}
    random = {device: state for device, state in random_states().items() if _key_of(device) in _names(metadata)}
    try:
        load_distributed(tensors | {_key_of(device): state for device, state in random.items()}, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_first_line(error)}") from error
    set_random_states(random)
    return progress.num_steps, reference


class _Reader(HuggingFaceStorageReader):
    """Reads every file's header once, on rank 0, and broadcasts the headers: torch would let every rank open every
    file."""

    known: Metadata | None = None

    def read_headers(self) -> None:
        """Reads headers on rank 0, before `share`."""
        self.known = super().read_metadata()

    def share(self) -> None:
        """Broadcasts the headers. Collective: every rank must call."""
        held = [self.known]
        dist.broadcast_object_list(held)
        self.known = held[0]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert self.known is not None
        return self.known


def _fresh_moments(
    optimizer: torch.optim.Optimizer, pieces: Iterable[Piece], adam_steps: Mapping[str, float]
) -> dict[str, Tensor]:
    """Creates optimizer state to load into for every parameter that was stepped; removes that of others."""
    optimizer.state.clear()
    # A fused optimizer counts steps on the parameter's device, others on the CPU.
    beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        # A rank without rows still takes part, with empty moments.
        if piece.name in adam_steps:
            moments = {moment: torch.zeros_like(piece.held) for moment in MOMENTS}
            if piece.box.numel:
                step = torch.tensor(adam_steps[piece.name], device=piece.held.device if beside else "cpu")
                optimizer.state[piece.held] = {"step": step, **moments}
            tensors |= {f"{moment}/{piece.name}": piece.like(values) for moment, values in moments.items()}
    return tensors


def _progress_of(found: Mapping[str, Any], common: Mapping[str, Any]) -> Progress:
    return Progress(**common, adam_steps={str(name): float(step) for name, step in found["adam_steps"].items()})


def _check_moments(folder: Path, metadata: Metadata, progress: Progress) -> None:
    """Refuses moments that `engine.json` does not count, or that no file contains: they would be lost silently."""
    saved = {key for key in _names(metadata) if not key.startswith(("weight/", "random/", "reference/"))}
    counted = {f"{moment}/{name}" for name in progress.adam_steps for moment in MOMENTS}
    if odd := sorted(saved ^ counted):
        raise CheckpointError(
            f"{folder} is damaged: {len(odd)} names of moments differ between {STATE} and the tensors, first {odd[0]!r}"
        )


def _check_fit(folder: Path, metadata: Metadata, pieces: Iterable[Piece], progress: Progress, *, moments: bool) -> None:
    """Checks names and shapes: torch silently skips parts that no file contains, and checks only shapes of shards."""
    weights = {piece.name: piece.shape for piece in pieces}
    saved = {key.removeprefix("weight/") for key in _names(metadata) if key.startswith("weight/")}
    if odd := sorted(saved ^ weights.keys()):
        raise CheckpointError(
            f"{folder} was saved from another model: {len(odd)} names differ, first {odd[0]!r}; load it with the model "
            "that it was saved from"
        )
    wanted = {f"weight/{name}": shape for name, shape in weights.items()}
    wanted |= {f"reference/{name}": shape for name, shape in weights.items() if progress.has_reference}
    wanted |= {
        f"{moment}/{name}": weights[name] for name in progress.adam_steps if name in weights for moment in MOMENTS
    }
    for key, shape in wanted.items():
        entry: Any = metadata.state_dict_metadata.get(key)
        found = tuple(entry.size) if entry is not None else None
        covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks) if entry is not None else 0
        if found != shape or covered != math.prod(shape):
            raise CheckpointError(
                f"{folder} is incomplete, or from another model: {key!r} has shape {found} and {covered} values there; "
                f"expected {shape} and {math.prod(shape)}"
            )


def _names(metadata: Metadata) -> set[str]:
    return set(metadata.state_dict_metadata)


def _random_key(device: str, rank: int) -> str:
    return f"random/{device}/{rank}"


def _key_of(device: str) -> str:
    return _random_key(device, dist.get_rank())


def _first_line(error: CheckpointException) -> str:
    """First line of an error; torch's message contains the tracebacks of every rank."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())), (0, (error, None)))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
