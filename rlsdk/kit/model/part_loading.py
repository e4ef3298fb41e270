"""Loads weights into a sharded model: each rank reads only its own boxes of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlsdk.interfaces import Box, ModelSpec
from rlsdk.kit.files.weight_files import HEADS, checkpoint_files, new_heads, open_weights
from rlsdk.kit.model.hf import build_model, canonical_parameters
from rlsdk.kit.ranks.progress import advance
from rlsdk.kit.weights.weight_fit import check_fits


class Piece(Protocol):
    """One rank's part of a parameter."""

    @property
    def name(self) -> str:
        """Canonical name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def boxes(self) -> Sequence[Box]:
        """What this rank holds; may be empty."""

    def fill(self, box: Box, values: Tensor) -> None:
        """Copies the values of one of `boxes`."""


def load_weights(
    model: Any, pieces: Iterable[Piece], tied: Mapping[str, str], spec: ModelSpec, *, seed: int, random: bool
) -> None:
    """Fills the parameters and buffers of a model that was built on the meta device and sharded.

    If the checkpoint has the model's names, only boxes are read. Random weights, and checkpoints that transformers
    converts on loading, are first built whole on the host, the same on every rank.

    Args:
        model: the transformers model; buffers that its own `_init_weights` does not restore are taken from a whole one.
        pieces: its parameters.
        tied: other names of a parameter -> its canonical name.
        spec: where weights come from.
        seed: of random weights.
        random: only the configuration is read.

    Raises:
        ConfigError: the checkpoint cannot be read or does not fit the model.
    """
    pieces = list(pieces)
    files = {} if random else checkpoint_files(spec)
    sources = {piece.name: _source(piece.name, files, tied) for piece in pieces}
    missing = {name for name, source in sources.items() if source is None}
    by_boxes = not random and all(name.partition(".")[0] in HEADS for name in missing)
    if not by_boxes or not restore_buffers(model, files):
        whole = build_model(spec, dtype=torch.float32, seed=seed, init_from_config=random)
        _copy_whole(whole, model, pieces)
        return
    shapes = {piece.name: piece.shape for piece in pieces}
    check_fits(spec, model, shapes, tied)
    _read_boxes({source: piece for piece in pieces if (source := sources[piece.name])}, files)
    heads = new_heads(model, seed, shapes) if missing else {}
    for piece in pieces:
        if piece.name in missing:
            fill_piece(piece, heads[piece.name])


@torch.no_grad()
def restore_buffers(model: Any, files: Mapping[str, Path]) -> bool:
    """Fills buffers, which are empty after building on the meta device: from the checkpoint, or as the model computes
    them.

    Returns:
        False if some buffer (a constant of remote code, say) is in neither.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers then skips it
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(prefix=name, recurse=False))
        for key, buffer in buffers.items():
            if key in files:
                with open_weights(files[key]) as file:
                    buffer.copy_(file.get_tensor(key))
            elif buffer.dtype is torch.bool:
                return False  # no value marks it as not filled
            else:
                buffer.fill_(_unfilled(buffer))
        if buffers.keys() - files.keys():
            model._init_weights(module)
        if any(_is_unfilled(buffer) for key, buffer in buffers.items() if key not in files):
            return False
    return True


def _copy_whole(whole: nn.Module, model: nn.Module, pieces: Iterable[Piece]) -> None:
    parameters, _ = canonical_parameters(whole)
    for piece in pieces:
        fill_piece(piece, parameters[piece.name].detach())
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def _read_boxes(pieces: Mapping[str, Piece], files: Mapping[str, Path]) -> None:
    """Reads this rank's boxes of each tensor; keys are names in the files."""
    by_file: dict[Path, list[str]] = {}
    for source in pieces:
        by_file.setdefault(files[source], []).append(source)
    for path, names in by_file.items():
        with open_weights(path) as file:
            for name in names:
                advance()
                piece, stored = pieces[name], file.get_slice(name)
                for box in piece.boxes:
                    piece.fill(box, stored[box.slices(Box.whole(piece.shape))])


@torch.no_grad()
def fill_piece(piece: Piece, whole: Tensor) -> None:
    """Copies this rank's part of a whole tensor."""
    for box in piece.boxes:
        piece.fill(box, whole[box.slices(Box.whole(piece.shape))])


def _source(name: str, files: Mapping[str, Path], tied: Mapping[str, str]) -> str | None:
    """Name of a parameter in the files; a tied one may have its other name."""
    names = [name, *(other for other, owner in tied.items() if owner == name)]
    return next((candidate for candidate in names if candidate in files), None)


def _unfilled(buffer: Tensor) -> float:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def _is_unfilled(buffer: Tensor) -> bool:
    mark = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
    return bool(mark.any())
