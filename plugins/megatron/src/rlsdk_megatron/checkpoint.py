"""Checkpoints: boxes of canonical tensors in safetensors, one file a rank, and a small JSON file.

Megatron's own checkpoints hold pickles, which this project loads from nowhere, and start a manager process for each
save. Boxes of canonical tensors need neither, and load under any split, because each rank knows which it holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlsdk.interfaces import Box, CheckpointError
from rlsdk.kit.atomic import atomic_write_json, atomic_write_tensors
from rlsdk.kit.together import agreed
from rlsdk_megatron.optimizer import MOMENTS, collect, slot_of
from rlsdk_megatron.parts import Held, Part

STATE = "engine.json"
KINDS = ("weight", *MOMENTS)
Key = tuple[str, Box]


def save(folder: Path, held: Sequence[Held], optimizer: Any, num_steps: int, *, shared: bool) -> None:
    """Writes weights, moments, schedule and random states. Every rank must call; returns when all are on the disk.

    Args:
        folder: exists, and is empty.
        held: this rank's parameters.
        optimizer: Megatron's; None: a frozen model.
        num_steps: optimizer steps taken.
        shared: the optimizer's state is split over replicas.

    Raises:
        CheckpointError: the disk refused on some rank; raised on all.
    """
    rank = dist.get_rank()
    mine = owned(held)
    tensors: dict[str, Tensor] = {f"random@{rank}": torch.get_rng_state()}
    for one in held:
        slot = slot_of(optimizer, one.parameter) if optimizer is not None else None
        # Replicas share the work of every parameter, so all of them pass here, whoever writes.
        values = _state(one, slot, num_steps if optimizer is not None else 0, shared=shared and optimizer is not None)
        for kind, whole in values.items():
            for part in one.parts:
                if (part.name, part.box) in mine:
                    tensors[_key(kind, part)] = part.view(whole).cpu()
    with agreed(f"{folder} cannot be written"):
        atomic_write_tensors(folder / f"rank-{rank:05d}.safetensors", tensors)
    with agreed(f"{folder} cannot be written"):
        if rank == 0:
            atomic_write_json(
                folder / STATE,
                {"format": 1, "num_steps": num_steps, "files": dist.get_world_size()},
            )


def _state(one: Held, slot: Any, num_steps: int, *, shared: bool) -> dict[str, Tensor]:
    """Weights and moments of a parameter, whole on the first of its replicas."""
    if slot is None and not shared:
        return {"weight": one.parameter.detach()}
    values = {"weight": collect(one.parameter, slot, slot.main if slot else None, shared=shared)}
    if num_steps:
        moments = slot.moments() if slot else {}
        values |= {kind: collect(one.parameter, slot, moments.get(kind), shared=shared) for kind in MOMENTS}
    return values


def owned(held: Sequence[Held]) -> set[Key]:
    """The boxes that this rank writes: each is written by the first rank that holds it. Every rank must call."""
    mine = [(part.name, part.box) for one in held for part in one.parts]
    theirs: list[list[Key]] = [[]] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    earlier = {key for keys in theirs[: dist.get_rank()] for key in keys}
    return set(mine) - earlier


def load(folder: Path, held: Sequence[Held], shapes: Mapping[str, tuple[int, ...]], optimizer: Any) -> int:
    """Restores what `save` wrote, under any split; returns `num_steps`. Every rank must call.

    Args:
        folder: of the checkpoint.
        held: this rank's parameters.
        shapes: of every canonical tensor of the model.
        optimizer: Megatron's; None: a frozen model.

    Raises:
        CheckpointError: the folder is not whole or holds another model; raised on all ranks, before anything changed.
    """
    with ExitStack() as stack:
        with agreed(f"{folder} cannot be loaded"):
            progress = _progress(folder)
            num_steps = int(progress["num_steps"])
            stored = _Stored(folder, int(progress["files"]), stack)
            stored.check(shapes, KINDS if optimizer is not None and num_steps else KINDS[:1])
        with agreed(f"{folder} cannot be loaded"), torch.no_grad():
            for one in held:
                _restore(one, stored, optimizer, num_steps)
            stored.restore_random_state()
    return num_steps


def _restore(one: Held, stored: _Stored, optimizer: Any, num_steps: int) -> None:
    slot = slot_of(optimizer, one.parameter) if optimizer is not None else None
    wanted = KINDS if slot is not None and num_steps else KINDS[:1]
    found: dict[str, Tensor] = {}
    for kind in wanted:
        whole = torch.zeros(one.parameter.shape, dtype=torch.float32, device=one.parameter.device)
        for part in one.parts:
            stored.read(kind, part, part.view(whole))
        found[kind] = whole
    one.parameter.copy_(found["weight"])
    if slot is not None:
        mine = {kind: whole.view(-1)[slot.start : slot.stop] for kind, whole in found.items()}
        slot.main.copy_(mine.pop("weight").view(slot.main.shape))
        moments = {kind: values.view(slot.main.shape).clone() for kind, values in mine.items()}
        slot.set_moments(moments, num_steps)


class _Stored:
    """What the files of a checkpoint hold."""

    def __init__(self, folder: Path, num_files: int, stack: ExitStack) -> None:
        self.folder = folder
        self.boxes: dict[tuple[str, str], list[tuple[Box, Any, str]]] = {}
        self.random: dict[int, tuple[Any, str]] = {}
        for rank in range(num_files):
            path = folder / f"rank-{rank:05d}.safetensors"
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is missing or damaged: {error}") from error
            for key in file.keys():  # noqa: SIM118 - a file, not a mapping
                what, _, place = key.rpartition("@")
                if what == "random":
                    self.random[int(place)] = (file, key)
                    continue
                kind, _, name = what.partition("/")
                offset = tuple(int(n) for n in place.split(","))
                box = Box(offset, tuple(file.get_slice(key).get_shape()))
                self.boxes.setdefault((kind, name), []).append((box, file, key))

    def check(self, shapes: Mapping[str, tuple[int, ...]], kinds: Sequence[str]) -> None:
        """Raises `CheckpointError` where a tensor of the model is not there, or not all of it."""
        saved = {name for kind, name in self.boxes if kind == "weight"}
        if odd := sorted(saved ^ shapes.keys()):
            raise CheckpointError(
                f"{self.folder} was saved from another model: {len(odd)} names differ, first {odd[0]!r}; load it with "
                "the model that it was saved from"
            )
        for kind in kinds:
            for name, shape in shapes.items():
                boxes = [box for box, _, _ in self.boxes.get((kind, name), [])]
                whole = Box.whole(shape)
                fits = all(len(box.size) == len(shape) and box.intersect(whole) == box for box in boxes)
                if not fits or sum(box.numel for box in boxes) != math.prod(shape):
                    raise CheckpointError(
                        f"{self.folder} is not whole, or from another model: {kind} of {name!r} does not fill "
                        f"{list(shape)} there"
                    )

    def read(self, kind: str, part: Part, into: Tensor) -> None:
        """Fills `into` with the values of a part's box, out of all stored boxes that it meets."""
        for box, file, key in self.boxes[kind, part.name]:
            if (common := box.intersect(part.box)) is not None:
                into[common.slices(part.box)] = file.get_slice(key)[common.slices(box)].to(into)

    def restore_random_state(self) -> None:
        """Of the rank of this number, where the saving run had one."""
        if found := self.random.get(dist.get_rank()):
            file, key = found
            torch.set_rng_state(file.get_tensor(key))


def _key(kind: str, part: Part) -> str:
    return f"{kind}/{part.name}@{','.join(map(str, part.box.offset))}"


def _progress(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / STATE).read_text())
        return {name: int(found[name]) for name in ("num_steps", "files")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is not a whole checkpoint of backend 'megatron': {type(error).__name__}: {error}"
        ) from error


def gathered(held: Sequence[Held], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Any]:
    """Yields `(name, whole tensor)` on rank 0 and `(name, None)` elsewhere, one tensor at a time. Every rank must call,
    and take all.
    """
    rank, mine = dist.get_rank(), owned(held)
    views = {
        (part.name, part.box): part.view(one.parameter)
        for one in held
        for part in one.parts
        if (part.name, part.box) in mine
    }
    held_by: list[list[Key]] = [[]] * dist.get_world_size()
    dist.all_gather_object(held_by, list(views))
    dtype = next(iter(held)).parameter.dtype
    for name in names:
        whole = torch.zeros(shapes[name], dtype=dtype) if rank == 0 else None
        for source, keys in enumerate(held_by):
            for key in (key for key in keys if key[0] == name):
                if rank == source != 0:
                    dist.send(views[key].cpu().contiguous(), 0)
                elif whole is not None:
                    place = key[1].slices(Box.whole(shapes[name]))
                    whole[place] = views[key].cpu() if source == 0 else _received(key[1], dtype, source)
        yield name, whole


def _received(box: Box, dtype: torch.dtype, source: int) -> Tensor:
    values = torch.empty(box.size, dtype=dtype)
    dist.recv(values, source)
    return values
