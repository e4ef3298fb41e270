"""Checkpoints: boxes of canonical tensors in safetensors, one file per rank, and a JSON index of their locations.

Megatron's own checkpoints contain pickles, which this project never loads, and start a manager process for each save.
Boxes of canonical tensors need neither, and load under any split, because each rank knows which boxes it holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlsdk.interfaces import Box, CheckpointError, LayoutError
from rlsdk.kit.files.atomic_files import atomic_write_json, atomic_write_tensors
from rlsdk.kit.model.adapters import check_base
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks
from rlsdk.kit.ranks.progress import advance
from rlsdk_megatron.optimizer import MOMENTS, collect, replicas, slot_of
from rlsdk_megatron.parts import Held, Part

STATE = "engine.json"
INDEX = "index.json"
KINDS = ("weight", *MOMENTS)
REFERENCE = "reference"
"""Kind of the values that an adapter had when the reference policy was kept."""
Key = tuple[str, Box]


def save(
    folder: Path,
    held: Sequence[Held],
    shapes: Mapping[str, tuple[int, ...]],
    optimizer: Any,
    num_steps: int,
    *,
    shared: bool,
    base: str | None = None,
    reference: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Writes weights, moments, schedule and random states. Collective: every rank must call; returns when all files are
    on disk.

    Args:
        folder: an existing, empty folder.
        held: this rank's parameters, of the adapter alone if there is one.
        shapes: shapes of all canonical tensors of which `held` is a part.
        optimizer: Megatron's; None: a frozen model.
        num_steps: optimizer steps taken.
        shared: the optimizer's state is split over replicas.
        base: fingerprint of the frozen weights below an adapter; None: there are none.
        reference: this rank's values of the adapter that the reference has; empty: it has none.

    Raises:
        CheckpointError: some rank could not write; raised on all.
    """
    rank = dist.get_rank()
    mine = owned(held, shapes)
    tensors: dict[str, Tensor] = {f"random@{rank}": torch.get_rng_state()}
    for one in held:
        advance()
        slot = slot_of(optimizer, one.parameter) if optimizer is not None else None
        # Replicas share the optimizer state of every parameter, so all of them collect it, not only the writer.
        values = _state(one, slot, num_steps if optimizer is not None else 0, shared=shared and optimizer is not None)
        for kind, whole in values.items():
            for part in one.parts:
                if (part.name, part.box) in mine:
                    tensors[_key(kind, part)] = part.view(whole).cpu()
    tensors |= {
        _key(REFERENCE, part): part.view(reference[part.name]).cpu()
        for one in held
        for part in one.parts
        if reference and (part.name, part.box) in mine
    }
    with raise_on_all_ranks(f"{folder} cannot be written"):
        atomic_write_tensors(folder / f"rank-{rank:05d}.safetensors", tensors)
    places = _gathered_index({key: list(values.shape) for key, values in tensors.items()})
    with raise_on_all_ranks(f"{folder} cannot be written"):
        if rank == 0:
            atomic_write_json(folder / INDEX, places)
            state = {"format": 1, "num_steps": num_steps, "files": dist.get_world_size(), "index": INDEX}
            more = {} if base is None else {"base": base, "has_reference": bool(reference)}
            atomic_write_json(folder / STATE, {**state, **more})


def _state(one: Held, slot: Any, num_steps: int, *, shared: bool) -> dict[str, Tensor]:
    """Weights and moments of a parameter, complete on the first of its replicas."""
    if slot is None and not shared:
        return {"weight": one.parameter.detach()}
    values = {"weight": collect(one.parameter, slot, slot.main if slot else None, shared=shared)}
    if num_steps:
        moments = slot.moments() if slot else {}
        values |= {kind: collect(one.parameter, slot, moments.get(kind), shared=shared) for kind in MOMENTS}
    return values


def _gathered_index(mine: Mapping[str, list[int]]) -> dict[str, Any]:
    """On rank 0: key -> number of its file, and its shape. Each box is listed once, by the rank that writes it."""
    rank = dist.get_rank()
    found: list[Mapping[str, list[int]]] | None = [{}] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, found)
    return {key: [file, shape] for file, keys in enumerate(found or ()) for key, shape in keys.items()}


def owned(held: Sequence[Held], shapes: Mapping[str, tuple[int, ...]]) -> set[Key]:
    """The boxes that this rank writes: the first rank that holds a box writes it. Collective: every rank must call.

    Megatron's groups determine this rank. Boxes are compared only within a group: tensor-parallel ranks share some
    weights (norms), and the first and last stage share a tied embedding.

    Raises:
        LayoutError: all ranks together would not write the whole model.
    """
    mine = {(part.name, part.box) for one in held if dist.get_rank(replicas(one.parameter)) == 0 for part in one.parts}
    for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        if (size := dist.get_world_size(group)) > 1:
            theirs: list[set[Key]] = [set()] * size
            dist.all_gather_object(theirs, mine, group=group)
            mine -= set[Key]().union(*theirs[: dist.get_rank(group)])
    total = torch.tensor(sum(box.numel for _, box in mine))
    dist.all_reduce(total)
    if (expected := sum(math.prod(shape) for shape in shapes.values())) != int(total):
        raise LayoutError(f"ranks would write {int(total)} values of a model that has {expected}; this is a defect of "
                          "backend 'megatron': please report the parallel sizes of the run")  # fmt: skip
    return mine


def load(
    folder: Path,
    held: Sequence[Held],
    shapes: Mapping[str, tuple[int, ...]],
    optimizer: Any,
    *,
    base: str | None = None,
) -> tuple[int, dict[str, Tensor]]:
    """Restores what `save` wrote, under any split; returns `num_steps` and this rank's `reference`. Collective: every
    rank must call.

    Args:
        folder: the checkpoint.
        held: this rank's parameters, of the adapter alone if there is one.
        shapes: shapes of all canonical tensors of which `held` is a part.
        optimizer: Megatron's; None: a frozen model.
        base: as in `save`, of this model.

    Raises:
        CheckpointError: the folder is incomplete or of another model; raised on all ranks, before any state changes.
    """
    with ExitStack() as stack:
        with raise_on_all_ranks(f"{folder} cannot be loaded"):
            progress = _read_progress(folder)
            check_base(folder, progress.base, base)
            kinds = KINDS if optimizer is not None and progress.num_steps else KINDS[:1]
            kinds = (*kinds, REFERENCE) if progress.has_reference else kinds
            stored = _Stored(folder, progress.files, stack, has_index=progress.has_index)
            stored.check(shapes, kinds)
            stored.open(held, kinds)
        with raise_on_all_ranks(f"{folder} cannot be loaded"), torch.no_grad():
            for one in held:
                _restore(one, stored, optimizer, progress.num_steps)
            reference = _read_reference(held, stored) if progress.has_reference else {}
            stored.restore_random_state()
    return progress.num_steps, reference


def _read_reference(held: Sequence[Held], stored: _Stored) -> dict[str, Tensor]:
    """By name; each parameter of an adapter is one box."""
    found = {}
    for one in held:
        for part in one.parts:
            found[part.name] = torch.zeros_like(one.parameter)
            stored.read(REFERENCE, part, part.view(found[part.name]))
    return found


def _restore(one: Held, stored: _Stored, optimizer: Any, num_steps: int) -> None:
    advance()
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
    """Content of a checkpoint's files. Only files with boxes of this rank are opened."""

    def __init__(self, folder: Path, num_files: int, stack: ExitStack, *, has_index: bool) -> None:
        self.folder = folder
        self.boxes: dict[tuple[str, str], list[tuple[Box, int, str]]] = {}
        self.random: dict[int, int] = {}
        """Rank -> number of the file with its random state."""
        self._stack = stack
        self._files: dict[int, Any] = {}
        for key, (file, shape) in (self._indexed() if has_index else self._read_headers(num_files)).items():
            what, _, place = key.rpartition("@")
            if what == "random":
                self.random[int(place)] = file
                continue
            kind, _, name = what.partition("/")
            offset = tuple(int(n) for n in place.split(","))
            self.boxes.setdefault((kind, name), []).append((Box(offset, tuple(shape)), file, key))

    def open(self, held: Sequence[Held], kinds: Sequence[str]) -> None:
        """Opens every file that a rank's parameters are read from.

        Raises:
            CheckpointError: a file is missing, truncated, or does not match the index.
        """
        needed = {
            (file, key, box.size)
            for one in held
            for part in one.parts
            for kind in kinds
            for box, file, key in self.boxes[kind, part.name]
            if box.intersect(part.box) is not None
        }
        own = self.random.get(dist.get_rank())
        for number in sorted({file for file, _, _ in needed} | ({own} if own is not None else set())):
            file = self._file(number)
            there = set(file.keys())
            for at, key, size in needed:
                if at == number and (key not in there or tuple(file.get_slice(key).get_shape()) != size):
                    raise CheckpointError(
                        f"rank-{number:05d}.safetensors of {self.folder} does not hold {key!r} of shape {list(size)}, "
                        "which the checkpoint's index lists: a file was replaced"
                    )

    def _indexed(self) -> dict[str, tuple[int, list[int]]]:
        """Key -> number of the file, and shape; from the index."""
        try:
            found = json.loads((self.folder / INDEX).read_text())
            return {str(key): (int(file), [int(n) for n in shape]) for key, (file, shape) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.folder / INDEX} is missing or damaged: {type(error).__name__}: {error}"
            ) from error

    def _read_headers(self, num_files: int) -> dict[str, tuple[int, list[int]]]:
        """As `_indexed`, from the headers of all files: an earlier version wrote no index."""
        files = {rank: self._file(rank) for rank in range(num_files)}
        return {key: (at, file.get_slice(key).get_shape()) for at, file in files.items() for key in file.keys()}  # noqa: SIM118 - a file, not a mapping

    def _file(self, number: int) -> Any:
        if number not in self._files:
            path = self.folder / f"rank-{number:05d}.safetensors"
            try:
                self._files[number] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is missing or damaged: {error}") from error
        return self._files[number]

    def check(self, shapes: Mapping[str, tuple[int, ...]], kinds: Sequence[str]) -> None:
        """Raises `CheckpointError` if a tensor of the model is missing or incomplete."""
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
                        f"{self.folder} is incomplete, or from another model: its boxes of {kind} of {name!r} do not "
                        f"fill {list(shape)}"
                    )

    def read(self, kind: str, part: Part, into: Tensor) -> None:
        """Fills `into` with the values of a part's box, from all stored boxes that overlap it."""
        for box, file, key in self.boxes[kind, part.name]:
            if (common := box.intersect(part.box)) is not None:
                into[common.slices(part.box)] = self._file(file).get_slice(key)[common.slices(box)].to(into)

    def restore_random_state(self) -> None:
        """Restores the random state of the rank with this number, if the saving run had one."""
        rank = dist.get_rank()
        if rank in self.random:
            torch.set_rng_state(self._file(self.random[rank]).get_tensor(f"random@{rank}"))


def _key(kind: str, part: Part) -> str:
    return f"{kind}/{part.name}@{','.join(map(str, part.box.offset))}"


@dataclass(frozen=True)
class _Progress:
    """Content of a checkpoint besides tensors."""

    num_steps: int
    files: int
    has_index: bool
    base: str | None
    """Fingerprint of the frozen weights below an adapter."""
    has_reference: bool
    """Whether it has the adapter of the reference."""


def _read_progress(folder: Path) -> _Progress:
    try:
        found = json.loads((folder / STATE).read_text())
        return _Progress(
            num_steps=int(found["num_steps"]),
            files=int(found["files"]),
            has_index="index" in found,
            base=found.get("base"),
            has_reference=bool(found.get("has_reference", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint of backend 'megatron': {type(error).__name__}: {error}"
        ) from error


Read = Callable[[Part, Tensor], Tensor]
"""Values of a part, from its parameter."""


class Gathering:
    """Gathers whole tensors one by one, each on its writer."""

    def __init__(self, held: Sequence[Held], shapes: Mapping[str, tuple[int, ...]], read: Read = Part.view) -> None:
        """Collective: every rank must call.

        Args:
            held: this rank's parameters.
            shapes: shapes of all canonical tensors of which `held` is a part.
            read: what is gathered of a part.
        """
        mine = owned(held, shapes)
        self._shapes, self._read = shapes, read
        self._parts = {
            (part.name, part.box): (part, one.parameter)
            for one in held
            for part in one.parts
            if (part.name, part.box) in mine
        }
        held_by: list[list[Key]] = [[]] * dist.get_world_size()
        dist.all_gather_object(held_by, list(self._parts))  # in the order of the model's tensors; each box once
        self._sources: dict[str, list[tuple[int, Box]]] = {}
        for rank, keys in enumerate(held_by):
            for name, box in keys:
                self._sources.setdefault(name, []).append((rank, box))

    def fetch(self, name: str, writer: int, dtype: torch.dtype) -> Tensor | None:
        """The whole tensor on rank `writer`, None elsewhere. Collective: every rank must call, in the same order of
        tensors."""
        rank = dist.get_rank()
        whole = torch.zeros(self._shapes[name], dtype=dtype) if rank == writer else None
        for source, box in self._sources.get(name, ()):
            if whole is not None:
                place = whole[box.slices(Box.whole(self._shapes[name]))]
                mine = source == writer
                place.copy_(self._read(*self._parts[name, box]) if mine else _received(box, dtype, source))
            elif rank == source:
                dist.send(self._read(*self._parts[name, box]).to("cpu", dtype).contiguous(), writer)
        return whole


def _received(box: Box, dtype: torch.dtype, source: int) -> Tensor:
    values = torch.empty(box.size, dtype=dtype)
    dist.recv(values, source)
    return values
