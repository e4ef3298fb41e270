"""Checkpoints of a sharded engine: torch's distributed checkpoint in safetensors files, and a small JSON file.

torch's default storage keeps its index as a pickle, which this project never loads. Its Hugging Face storage puts the
location of each shard into the safetensors header instead, and needs no index. Planning, balancing over replicas,
resharding and raising errors on every rank are done by torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from rlsdk.kit.files.atomic_files import atomic_write_json
from rlsdk.kit.model.adapters import check_base
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks
from rlsdk_fsdp.shards import Piece

STATE = "engine.json"
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, with the shape of a parameter; it also counts steps."""


@dataclass
class Progress:
    """Content of a checkpoint besides tensors."""

    num_steps: int = 0
    """Steps of the schedule."""
    adam_steps: dict[str, float] = field(default_factory=dict)
    """Name -> AdamW's step count; parameters without any gradient so far have none."""
    world_size: int = 1
    """Number of ranks that saved it, each with a random state."""
    base: str | None = None
    """Fingerprint of the frozen weights below an adapter."""
    has_reference: bool = False
    """Whether it has the adapter of the reference."""


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
    progress = Progress(num_steps=num_steps, world_size=world_size, base=base, has_reference=bool(reference))
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        tensors[f"weight/{piece.name}"] = piece.like(piece.held.detach())
        state = optimizer.state.get(piece.held) if optimizer is not None else None
        if state:
            progress.adam_steps[piece.name] = float(state["step"])
            tensors |= {f"{moment}/{piece.name}": piece.like(state[moment]) for moment in MOMENTS}
        if reference:
            tensors[f"reference/{piece.name}"] = piece.like(reference[piece.name])
    tensors |= {_random_key(device, rank): state for device, state in _random_states().items()}
    try:
        save_distributed(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be written: {_first_line(error)}") from error
    with raise_on_all_ranks(f"{folder} cannot be written"):
        if rank == 0:
            atomic_write_json(folder / STATE, {"format": FORMAT, **vars(progress)})


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
        progress = _read_progress(folder)
        check_base(folder, progress.base, base)
        if dist.get_rank() == 0:
            reader.read_headers()
    reader.share()
    with raise_on_all_ranks(f"{folder} cannot be loaded"):
        metadata = reader.read_metadata()
        _check_fit(folder, metadata, pieces, progress if optimizer is not None else Progress())
        _check_moments(folder, metadata, progress)
    tensors = {f"weight/{piece.name}": piece.like(piece.held.detach()) for piece in pieces}
    if optimizer is not None:
        tensors |= _fresh_moments(optimizer, pieces, progress.adam_steps)
    reference = {piece.name: torch.zeros_like(piece.held) for piece in pieces if progress.has_reference}
    tensors |= {f"reference/{piece.name}": piece.like(reference[piece.name]) for piece in pieces if reference}
    random = {device: state for device, state in _random_states().items() if _key_of(device) in _names(metadata)}
    try:
        load_distributed(tensors | {_key_of(device): state for device, state in random.items()}, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_first_line(error)}") from error
    _set_random_states(random)
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


def _read_progress(folder: Path) -> Progress:
    try:
        found = json.loads((folder / STATE).read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"{STATE} has format {found['format']!r}, expected {FORMAT}")
        return Progress(
            num_steps=int(found["num_steps"]),
            adam_steps={str(name): float(step) for name, step in found["adam_steps"].items()},
            world_size=int(found["world_size"]),
            base=found.get("base"),
            has_reference=bool(found.get("has_reference", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint of backend 'fsdp': {type(error).__name__}: {error}"
        ) from error


def _check_moments(folder: Path, metadata: Metadata, progress: Progress) -> None:
    """Refuses moments that `engine.json` does not count, or that no file contains: they would be lost silently."""
    saved = {key for key in _names(metadata) if not key.startswith(("weight/", "random/", "reference/"))}
    counted = {f"{moment}/{name}" for name in progress.adam_steps for moment in MOMENTS}
    if odd := sorted(saved ^ counted):
        raise CheckpointError(
            f"{folder} is damaged: {len(odd)} names of moments differ between {STATE} and the tensors, first {odd[0]!r}"
        )


def _check_fit(folder: Path, metadata: Metadata, pieces: Iterable[Piece], progress: Progress) -> None:
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


def _random_states() -> dict[str, Tensor]:
    """Random states of this rank, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _random_key(device: str, rank: int) -> str:
    return f"random/{device}/{rank}"


def _key_of(device: str) -> str:
    return _random_key(device, dist.get_rank())


def _first_line(error: CheckpointException) -> str:
    """First line of an error; torch's message contains the tracebacks of every rank."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())), (0, (error, None)))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
