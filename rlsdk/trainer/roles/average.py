"""The exponential moving average of one rank's weights, and its export as a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlsdk.algorithms import update_average
from rlsdk.interfaces import Box, CheckpointError, TrainEngine
from rlsdk.kit.files.atomic_files import atomic_write_tensors

_BOXES = "boxes"
"""Key in a file's metadata: the boxes (slices) that it holds, in the order of its tensors."""


class WeightAverage:
    """Average of one rank's weights, float32 in host memory. Initialized to the current weights."""

    def __init__(self, engine: TrainEngine, decay: float) -> None:
        """
        Args:
            engine: train engine whose weights are averaged; they must be on its device.
            decay: share of the old average that is kept at an update.
        """
        self._engine = engine
        self._decay = decay
        self._boxes = {str(at): (shard.name, shard.box) for at, shard in enumerate(engine.shards())}
        self._means = {key: tensor.clone() for key, tensor in self._weights()}

    def update(self) -> None:
        """Updates the average with the current weights, shard by shard."""
        for key, weights in self._weights():
            update_average({key: self._means[key]}, {key: weights}, self._decay)

    def save(self, file: Path) -> None:
        """Writes this rank's part."""
        boxes = [[name, box.offset, box.size] for name, box in self._boxes.values()]
        atomic_write_tensors(file, self._means, {_BOXES: json.dumps(boxes)})

    def load(self, folder: Path) -> None:
        """Reads this rank's boxes from the parts that any number of ranks wrote.

        Raises:
            CheckpointError: a part of a tensor is missing.
        """
        with _Parts(folder) as parts:
            for key, (name, box) in self._boxes.items():
                self._means[key].copy_(parts.read(name, box))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for at, shard in enumerate(self._engine.shards()):
            yield str(at), shard.tensor.detach().to("cpu", torch.float32)


def export_average(parts: Path, model: Path, target: Path) -> None:
    """Writes the average as a Hugging Face folder: files, names and dtypes of `model`, values of the average.

    Args:
        parts: folder with the parts that the ranks wrote.
        model: folder of the averaged model; its files other than weights are copied.
        target: a new folder.
    """
    target.mkdir()
    with _Parts(parts) as average:
        for file in sorted(model.iterdir()):
            if file.suffix != ".safetensors":
                shutil.copy(file, target / file.name)
                continue
            weights = load_file(file)
            averaged = {
                name: average.read(name, Box.whole(tuple(tensor.shape))).to(tensor.dtype) if name in average else tensor
                for name, tensor in weights.items()
            }
            atomic_write_tensors(target / file.name, averaged)


class _Parts:
    """The boxes in a folder's files; each is read on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._of: dict[str, list[tuple[Any, str, Box]]] = {}

    def __enter__(self) -> _Parts:
        for path in sorted(self._folder.glob("*.safetensors")):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            boxes = json.loads(file.metadata()[_BOXES])
            for key, (name, offset, size) in enumerate(boxes):
                self._of.setdefault(name, []).append((file, str(key), Box(tuple(offset), tuple(size))))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box: float32, shape `box.size`."""
        values = torch.full(box.size, torch.nan)
        for file, key, here in self._of.get(name, ()):
            common = here.intersect(box)
            if common is not None:
                values[common.slices(box)] = file.get_tensor(key)[common.slices(here)]
        if values.isnan().any():
            raise CheckpointError(
                f"{str(self._folder)!r}: the average of {name!r} at {box} is not whole: a file of a rank is missing, "
                "or the weights were not finite; set train.ema_decay null to continue without the average"
            )
        return values
