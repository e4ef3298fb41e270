"""Checkpoints of any stage: a safetensors file per rank, and a small JSON file.

DeepSpeed's own checkpoints are pickles, which this project never loads. Here every rank writes its ranges of weights
and moments, with the ranges in the file's header; a rank of another number of ranks, or of another stage, reads what it
needs of each file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlsdk.interfaces import CheckpointError
from rlsdk.kit.files import engine_progress
from rlsdk.kit.files.atomic_files import atomic_write_tensors
from rlsdk.kit.files.engine_progress import read_progress, write_progress
from rlsdk.kit.model.adapters import check_base
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks
from rlsdk.kit.ranks.progress import advance
from rlsdk.kit.ranks.random_states import random_states, set_random_states
from rlsdk_deepspeed.shards import Piece, Range

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, laid out as the weights that it steps."""
RANGES = "ranges"
"""Key in a file's header: name -> first flat element, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class Progress(engine_progress.Progress):
    """Content of a checkpoint besides tensors."""

    adam_steps: float | None
    """AdamW's step count; None: it has not stepped, and there are no moments."""
    shapes: Mapping[str, Sequence[int]]
    """Canonical name -> shape."""

    @property
    def kinds(self) -> Sequence[str]:
        """Kinds of tensors that it has of each name."""
        return (
            "weight",
            *(() if self.adam_steps is None else MOMENTS),
            *(("reference",) if self.has_reference else ()),
        )


def save(
    folder: Path,
    pieces: Sequence[Piece],
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
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = steps_of(optimizer, pieces)
    tensors = {f"weight/{piece.name}": piece.held for piece in pieces if len(piece.held)}
    if optimizer is not None and steps is not None:
        tensors |= {
            f"{moment}/{piece.name}": piece.of(optimizer.state[piece.flat][moment])
            for piece in pieces
            for moment in MOMENTS
            if len(piece.held)
        }
    tensors |= {f"reference/{piece.name}": reference[piece.name] for piece in pieces if reference and len(piece.held)}
    tensors |= {f"random/{device}": state for device, state in random_states().items()}
    ranges = {piece.name: piece.range for piece in pieces if len(piece.held)}
    progress = Progress(
        num_steps=num_steps,
        adam_steps=steps,
        world_size=world,
        shapes={piece.name: piece.shape for piece in pieces},
        base=base,
        has_reference=bool(reference),
    )
    with raise_on_all_ranks(f"{folder} cannot be written"):
        # safetensors refuses views of one memory.
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        atomic_write_tensors(folder / file_of(rank, world), copies, {RANGES: json.dumps(ranges)})
    with raise_on_all_ranks(f"{folder} cannot be written"):
        if rank == 0:
            write_progress(folder, progress)


def load(
    folder: Path, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer | None, *, base: str | None = None
) -> tuple[int, dict[str, Tensor]]:
    """Restores what `save` wrote, on any number of ranks and with any stage; returns `num_steps` and `reference`.
    Collective: every rank must call. The weights that passes run on are still the old ones.

    Rank r gets the random state of rank r; ranks beyond those of the saving run keep their own. `base` is that of this
    model.

    Raises:
        CheckpointError: the folder is incomplete or of another model; raised on all ranks, which keep their state.
    """
    with raise_on_all_ranks(f"{folder} cannot be loaded"):
        progress = read_progress(folder, "deepspeed", _progress_of)
        check_base(folder, progress.base, base)
        _check_model(folder, progress, pieces)
        files = _read_headers(folder, progress)
        kinds = [kind for kind in progress.kinds if optimizer is not None or kind not in MOMENTS]
        _check_whole(folder, files, progress, kinds)
        read = {kind: {piece.name: _read(files, kind, piece) for piece in pieces} for kind in kinds}
        random = _read_random(folder, progress)
    with torch.no_grad():
        for piece in pieces:
            piece.held.copy_(read["weight"][piece.name])
        if optimizer is not None:
            _set_moments(optimizer, pieces, progress.adam_steps, read)
    set_random_states(random)
    reference = {piece.name: values.to(piece.flat.device) for piece in pieces
                 if (values := read.get("reference", {}).get(piece.name)) is not None}  # fmt: skip
    return progress.num_steps, reference


def steps_of(optimizer: torch.optim.Optimizer | None, pieces: Iterable[Piece]) -> float | None:
    """AdamW's step count, the same for all weights; None before the first step."""
    states = (optimizer.state.get(piece.flat) for piece in pieces) if optimizer is not None else ()
    return next((float(state["step"]) for state in states if state), None)


def file_of(rank: int, world: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def _set_moments(
    optimizer: torch.optim.Optimizer,
    pieces: Iterable[Piece],
    steps: float | None,
    read: Mapping[str, Mapping[str, Tensor]],
) -> None:
    optimizer.state.clear()
    if steps is None:
        return
    # A fused optimizer counts steps on the parameter's device, others on the CPU.
    beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for piece in pieces:
        if piece.flat not in optimizer.state:
            count = torch.tensor(steps, device=piece.flat.device if beside else "cpu")
            moments = {moment: torch.zeros_like(piece.flat, requires_grad=False) for moment in MOMENTS}
            optimizer.state[piece.flat] = {"step": count, **moments}
        for moment in MOMENTS:
            piece.of(optimizer.state[piece.flat][moment]).copy_(read[moment][piece.name])


def _progress_of(found: Mapping[str, Any], common: Mapping[str, Any]) -> Progress:
    steps = found["adam_steps"]
    return Progress(
        **common,
        adam_steps=None if steps is None else float(steps),
        shapes={str(name): [int(size) for size in shape] for name, shape in found["shapes"].items()},
    )


def _check_model(folder: Path, progress: Progress, pieces: Iterable[Piece]) -> None:
    mine = {piece.name: list(piece.shape) for piece in pieces}
    odd = sorted(name for name in mine.keys() | progress.shapes.keys() if mine.get(name) != progress.shapes.get(name))
    if odd:
        raise CheckpointError(
            f"{folder} was saved from another model: {len(odd)} names or shapes differ, first {odd[0]!r}: "
            f"{progress.shapes.get(odd[0])} there, {mine.get(odd[0])} here; load it with the model that it was saved "
            "from"
        )


@dataclass(frozen=True)
class _File:
    """One rank's file, of which only the header has been read."""

    path: Path
    sizes: Mapping[str, int]
    """Name of a tensor -> number of elements."""
    ranges: Mapping[str, Range]


def _read_headers(folder: Path, progress: Progress) -> list[_File]:
    files = []
    for rank in range(progress.world_size):
        path = folder / file_of(rank, progress.world_size)
        try:
            with safe_open(path, framework="pt") as file:
                ranges = json.loads(file.metadata()[RANGES])
                sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            files.append(_File(path, sizes, {str(name): (int(a), int(b)) for name, (a, b) in ranges.items()}))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder} is incomplete: {path.name}: {type(error).__name__}: {error}") from error
    return files


def _check_whole(folder: Path, files: Sequence[_File], progress: Progress, kinds: Sequence[str]) -> None:
    """Every element of every tensor is in exactly one file, or in all files; no file has a tensor that is not
    counted."""
    expected = {f"{kind}/{name}" for kind in progress.kinds for name in progress.shapes}
    for file in files:
        for key, size in file.sizes.items():
            kind, _, name = key.partition("/")
            start, stop = file.ranges.get(name, (0, 0))
            if kind != "random" and (key not in expected or size != stop - start):
                raise CheckpointError(f"{folder} is damaged: {file.path.name} has {size} elements of {key!r}, which "
                                      f"its header places at {start} to {stop}")  # fmt: skip
    for kind in kinds:
        for name, shape in progress.shapes.items():
            at = 0
            for start, stop in sorted(f.ranges[name] for f in files if f"{kind}/{name}" in f.sizes):
                if start > at:
                    break
                at = max(at, stop)
            if at != math.prod(shape):
                raise CheckpointError(f"{folder} is incomplete: of {kind}/{name} the elements from {at} of "
                                      f"{math.prod(shape)} are in no file")  # fmt: skip


def _read(files: Sequence[_File], kind: str, piece: Piece) -> Tensor:
    """This rank's elements of a tensor, from all files."""
    advance()
    first, last = piece.range
    values = torch.empty(last - first, dtype=piece.flat.dtype)
    for file in files:
        start, stop = file.ranges.get(piece.name, (0, 0))
        low, high = max(start, first), min(stop, last)
        if low < high:
            with safe_open(file.path, framework="pt") as stored:
                values[low - first : high - first] = stored.get_slice(f"{kind}/{piece.name}")[
                    low - start : high - start
                ]
    return values


def _read_random(folder: Path, progress: Progress) -> dict[str, Tensor]:
    rank = dist.get_rank()
    if rank >= progress.world_size:
        return {}
    with safe_open(folder / file_of(rank, progress.world_size), framework="pt") as file:
        names = set(file.keys())
        return {kind: file.get_tensor(f"random/{kind}") for kind in random_states() if f"random/{kind}" in names}
