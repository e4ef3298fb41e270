"""Checkpoints of a sharded engine: per rank a safetensors file and a JSON list of boxes. No pickle.

torch's own distributed checkpoint keeps its index as a pickle, which this project loads from nowhere. Boxes are the
same language that weights are synced in: a rank that loads takes the intersections with its own, whatever split the
checkpoint was saved at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Box, CheckpointError
from rlsdk.kit.atomic import atomic_write_json


@dataclass(frozen=True)
class Part:
    """This rank's values of one tensor, by what they are (`weight`, `exp_avg`, ...)."""

    name: str
    box: Box
    values: Mapping[str, Tensor]


def write_rank(folder: Path, rank: int, parts: Iterator[Part], extra: Mapping[str, Any], random: Tensor) -> None:
    """Writes what one rank holds."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {"random": random}
    boxes: dict[str, Any] = {}
    for part in parts:
        boxes[part.name] = {"offset": part.box.offset, "size": part.box.size, "kinds": sorted(part.values)}
        tensors |= {f"{kind}/{part.name}": value.detach().cpu().contiguous() for kind, value in part.values.items()}
    save_file(tensors, folder / f"rank_{rank:05d}.safetensors")
    atomic_write_json(folder / f"rank_{rank:05d}.json", {"format": 1, "boxes": boxes, **extra})


class SavedShards:
    """A checkpoint, readable box by box."""

    def __init__(self, folder: Path) -> None:
        """Raises: CheckpointError: there is none, or it is not whole."""
        self.folder = folder
        try:
            self.ranks = {int(f.stem[5:]): json.loads(f.read_text()) for f in sorted(folder.glob("rank_*.json"))}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} is not a whole checkpoint of backend 'fsdp': {error}") from error
        if not self.ranks:
            raise CheckpointError(f"{folder} holds no checkpoint of backend 'fsdp' (rank_*.json)")
        self._files: dict[int, Any] = {}
        self.names = {name for rank in self.ranks.values() for name in rank["boxes"]}

    @property
    def extra(self) -> Mapping[str, Any]:
        """What rank 0 wrote besides tensors."""
        found: Mapping[str, Any] = self.ranks[min(self.ranks)]
        return found

    def read(self, kind: str, name: str, box: Box) -> Tensor | None:
        """The values of a box, put together from whoever saved parts of it; None where none of that kind was saved.

        Raises:
            CheckpointError: parts are missing.
        """
        out: Tensor | None = None
        covered = 0
        for rank, saved in self.ranks.items():
            entry = saved["boxes"].get(name)
            if entry is None or kind not in entry["kinds"]:
                continue
            have = Box(tuple(entry["offset"]), tuple(entry["size"]))
            if kind == "step":
                return self._tensor(rank, f"{kind}/{name}")
            common = have.intersect(box)
            if common is None:
                continue
            piece = self._open(rank).get_slice(f"{kind}/{name}")[common.slices(have)]
            out = torch.empty(box.size, dtype=piece.dtype) if out is None else out
            out[common.slices(box)] = piece
            covered += common.numel
        if out is not None and covered != box.numel:
            raise CheckpointError(f"{self.folder}: {kind} of {name!r} covers {covered} of {box.numel} values")
        return out

    def random(self, rank: int) -> Tensor | None:
        """The random state of a rank, if that rank saved one."""
        return self._tensor(rank, "random") if rank in self.ranks else None

    def _tensor(self, rank: int, key: str) -> Tensor:
        found: Tensor = self._open(rank).get_tensor(key)
        return found

    def _open(self, rank: int) -> Any:
        from safetensors import safe_open

        if rank not in self._files:
            path = self.folder / f"rank_{rank:05d}.safetensors"
            try:
                self._files[rank] = safe_open(path, framework="pt")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._files[rank]
