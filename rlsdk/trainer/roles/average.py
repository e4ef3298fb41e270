"""The exponential moving average of the actor's weights: each rank averages the weights it holds; exported as a
model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlsdk.algorithms import update_average
from rlsdk.config.sections.role_names import ACTOR
from rlsdk.interfaces import Box, CheckpointError, TrainEngine
from rlsdk.kit.files.atomic_files import atomic_write_tensors
from rlsdk.trainer.checkpoints.checkpoint import MODEL_FOLDER

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session

AVERAGE_FOLDER = "model_average"
"""Folder in a checkpoint: the average in Hugging Face format."""
_PARTS_FOLDER = "actor_average"
"""Folder in a checkpoint: each rank's part of the average."""
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


class PolicyAverage:
    """The averaged weights of a run's policy, over all its ranks. Runs in the controller."""

    def __init__(
        self, session: Session, decay: float, *, timeout_s: float | None = None, update_timeout_s: float | None = None
    ) -> None:
        """Initializes the average to the current weights.

        Args:
            session: the session whose actor is averaged.
            decay: share of the old average that is kept at an update.
            timeout_s: for each part of a checkpoint; None: the timeout of the actor's group.
            update_timeout_s: for an update; None: the timeout of the actor's group.
        """
        self._update_timeout_s = update_timeout_s
        self._session = session
        self._decay = decay
        self._timeout_s = timeout_s
        self._start()

    def update(self) -> None:
        """Updates the average with the current weights."""
        with self._session.turns.using(ACTOR):
            self._session.actor.run("update_average", timeout_s=self._update_timeout_s)

    def save(self, checkpoint: Path) -> None:
        """Writes the average into a checkpoint; if the checkpoint has an exported model, exports the averaged model
        too."""
        self.begin_save(checkpoint)()

    def begin_save(self, checkpoint: Path) -> Callable[[], None]:
        """As `save`, without waiting: each rank writes its part before later calls, including `update`. Returns a
        function that waits for the parts and exports the averaged model; call it once the exported model exists.
        """
        parts = checkpoint / _PARTS_FOLDER
        parts.mkdir()
        written = self._session.actor.submit("save_average", str(parts))

        def finish() -> None:
            written.result(self._timeout_s)
            if (checkpoint / MODEL_FOLDER).is_dir():
                export_average(parts, checkpoint / MODEL_FOLDER, checkpoint / AVERAGE_FOLDER)

        return finish

    def load(self, checkpoint: Path) -> None:
        """Restores the average from a checkpoint; starts from the loaded weights if the checkpoint has no average."""
        parts = checkpoint / _PARTS_FOLDER
        if parts.is_dir():
            self._session.actor.run("load_average", str(parts), timeout_s=self._timeout_s)
        else:
            self._start()

    def _start(self) -> None:
        with self._session.turns.using(ACTOR):
            self._session.actor.run("start_average", self._decay, timeout_s=self._update_timeout_s)


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
                "or the weights were not finite; set train.ema_decay null to go on without the average"
            )
        return values
