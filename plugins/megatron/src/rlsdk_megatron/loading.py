"""Loads weights into stages: each rank reads only its own boxes of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Box, ConfigError, ModelSpec
from rlsdk.kit.files.weight_files import HEADS, checkpoint_files, new_heads, open_weights
from rlsdk.kit.model.hf import build_model, canonical_parameters, canonical_tensors
from rlsdk.kit.weights.file_tensors import file_tensors
from rlsdk.kit.weights.weight_fit import check_fits
from rlsdk_megatron.parts import Held

Read = Callable[[str, Box], Tensor]
"""Returns the values of a box of a canonical tensor."""


@torch.no_grad()
def load_weights(held: Sequence[Held], empty: Any, spec: ModelSpec, *, seed: int, random: bool) -> None:
    """Fills every parameter of this rank.

    Args:
        held: the parameters to fill.
        empty: the transformers model, on the meta device.
        spec: where weights come from.
        seed: seed of random weights, and of heads that the checkpoint does not have.
        random: read only the configuration; the whole model is then built on the host first.

    Raises:
        ConfigError: the checkpoint cannot be read or does not fit the model.
    """
    with ExitStack() as stack:
        if random:
            whole, _ = canonical_parameters(build_model(spec, dtype=torch.float32, seed=seed, init_from_config=True))
            read: Read = _Tensors({name: p.detach() for name, p in whole.items()})
        else:
            shapes, tied = canonical_parameters(empty)
            files = checkpoint_files(spec)
            own = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(empty)[0].items()}
            check_fits(spec, empty, own, tied, file_tensors(empty, own))
            heads = {} if all(name in files for name in shapes if _is_head(name)) else new_heads(empty, seed, own)
            read = stack.enter_context(_Files(files, {n: tuple(p.shape) for n, p in shapes.items()}, tied, heads))
        for one in held:
            if sum(part.box.numel for part in one.parts) < one.parameter.numel():
                one.parameter.zero_()
            for part in one.parts:
                part.view(one.parameter).copy_(read(part.name, part.box))


def _is_head(name: str) -> bool:
    return name.partition(".")[0] in HEADS


class _Tensors:
    """Whole tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, name: str, box: Box) -> Tensor:
        tensor = self.tensors[name]
        return tensor[box.slices(Box.whole(tuple(tensor.shape)))]


EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


class _Files:
    """Safetensors files, opened on demand. Experts may share one tensor, or have one each."""

    def __init__(
        self,
        files: Mapping[str, Path],
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        heads: Mapping[str, Tensor],
    ) -> None:
        self.files, self.shapes, self.tied = files, shapes, tied
        self.heads = _Tensors(heads)
        self.stack = ExitStack()
        self.opened: dict[Path, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()

    def __call__(self, name: str, box: Box) -> Tensor:
        if name in self.heads.tensors and name not in self.files:
            return self.heads(name, box)
        names = [name, *(other for other, owner in self.tied.items() if owner == name)]
        found = next((candidate for candidate in names if candidate in self.files), None)
        if found is not None:
            return self._slice(found, box, self.shapes[name])
        if match := EXPERTS.fullmatch(name):
            return self._expert(match[1], match[2], box, self.shapes[name])
        raise ConfigError(f"the checkpoint lacks {name!r}; give a folder with the whole model")

    def _expert(self, prefix: str, kind: str, box: Box, shape: tuple[int, ...]) -> Tensor:
        """A box within one expert, from that expert's own matrices."""
        expert, row, column = box.offset
        _, rows, columns = box.size
        if kind == "down":
            return self._slice(f"{prefix}.{expert}.down_proj.weight", Box((row, column), (rows, columns)), shape[1:])[
                None
            ]
        half = shape[1] // 2
        taken = []
        for at, name in enumerate(("gate_proj", "up_proj")):
            low, high = max(row, at * half), min(row + rows, (at + 1) * half)
            if low < high:
                part = Box((low - at * half, column), (high - low, columns))
                taken.append(self._slice(f"{prefix}.{expert}.{name}.weight", part, (half, shape[2])))
        return torch.cat(taken)[None]

    def _slice(self, name: str, box: Box, shape: tuple[int, ...]) -> Tensor:
        path = self.files.get(name)
        if path is None:
            raise ConfigError(f"the checkpoint lacks {name!r}; give a folder with the whole model")
        if path not in self.opened:
            self.opened[path] = self.stack.enter_context(open_weights(path))
        stored = self.opened[path].get_slice(name)
        if (found := tuple(stored.get_shape())) != tuple(shape):
            raise ConfigError(
                f"{path}: {name!r} has shape {found}, but config.json makes it {tuple(shape)}; the folder mixes files "
                "of two models"
            )
        values: Tensor = stored[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
        return values
