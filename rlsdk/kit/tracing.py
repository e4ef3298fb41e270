"""Where each canonical tensor lies in the engine's own memory, learned by watching its weight loaders at work.

Engines join query, key and value, or gate and up, in one parameter, pad vocabularies and cut over workers. All of that
is in the loaders of each model class. They are run once on tensors that have a shape and no values: every copy that
they try to make says which box of which canonical tensor goes where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlsdk.interfaces import Box

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a canonical tensor, and the engine's memory that holds it."""

    box: Box
    memory: Tensor
    """A view of shape `box.size`."""


def trace_loaders(load: Loader, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Piece]]:
    """Runs `load` over all tensors without moving a value.

    Args:
        load: what takes (canonical name, tensor) pairs into a model.
        shapes: canonical name -> full shape.

    Returns:
        The pieces of each tensor that this process holds; a tensor of which it holds none, or whose path could not be
        followed, has an empty list.
    """
    recorder = _Recorder()

    def stand_ins() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            yield name, recorder.stand_in(name, tuple(shape))

    with torch.no_grad(), recorder:
        load(stand_ins())
    return {name: recorder.pieces.get(name, []) for name in shapes}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies out of stand-ins in place of making them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[str, list[Piece]] = {}
        self._owners: dict[int, tuple[str, Tensor]] = {}

    def stand_in(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device="meta")
        # Kept alive: storages are told apart by their address.
        self._owners[tensor.untyped_storage()._cdata] = (name, tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1]
        owner = self._owners.get(source.untyped_storage()._cdata) if source.is_meta else None
        if owner is None:
            return func(*args, **(kwargs or {}))
        name, whole = owner
        place = place_of(source, whole)
        if place is not None and target.shape == source.shape:
            box, dims = place
            # Dimensions that a loader took one index of are back, with a size of one.
            strides = [1] * len(box.size)
            for dim, stride in zip(dims, target.stride(), strict=True):
                if dim is not None:
                    strides[dim] = stride
            memory = target.detach().as_strided(box.size, strides, target.storage_offset())
            self.pieces.setdefault(name, []).append(Piece(box=box, memory=memory))
        return target


def place_of(view: Tensor, whole: Tensor) -> tuple[Box, list[int | None]] | None:
    """Which box of a contiguous tensor a view shows, and which of the tensor's dimensions each of the view's is (None:
    one of size 1). None when it is no box in the tensor's own order of dimensions; it may have fewer of them."""
    size, dims, following = [1] * whole.dim(), [], 0
    for length, stride in zip(view.shape, view.stride(), strict=True):
        dim = None
        if length != 1:
            candidates = (d for d in range(following, whole.dim()) if whole.stride(d) == stride and whole.shape[d] > 1)
            dim = next(candidates, None)
            if dim is None:
                return None
            size[dim], following = length, dim + 1
        dims.append(dim)
    left, offset = view.storage_offset(), []
    for stride in whole.stride():
        offset.append(left // stride)
        left %= stride
    box = Box(tuple(offset), tuple(size))
    inside = box.intersect(Box.whole(tuple(whole.shape))) == box or math.prod(box.size) == 0
    return (box, dims) if inside else None
