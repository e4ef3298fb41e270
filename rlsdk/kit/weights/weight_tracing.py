"""Finds where each canonical tensor is stored in the engine's own memory, by tracing its weight loaders.

Engines fuse query, key and value, or gate and up, in one parameter, pad vocabularies and split over workers. The
loaders of each model class implement all that. They are run once on tensors with a shape but no values: every attempted
copy shows which box of which canonical tensor goes where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlsdk.interfaces import Box
from rlsdk.kit.weights.tensor_origins import Part, Source, place_of, seen

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a canonical tensor, and the engine's memory that holds it."""

    box: Box
    memory: Tensor
    """A view of shape `box.size`."""


def trace_loaders(
    load: Loader, shapes: Mapping[str, Sequence[int]], sources: Sequence[Source] | None = None
) -> dict[str, list[Piece]]:
    """Runs `load` on all tensors without copying values.

    Args:
        load: loads (name, tensor) pairs into a model.
        shapes: canonical name -> full shape.
        sources: the tensors to load; None: the canonical tensors.

    Returns:
        The pieces of each canonical tensor in this process; empty for a tensor of which it has none, or that could not
        be traced.
    """
    recorder = Recorder()
    loaded = sources if sources is not None else [Source.whole(name, shape) for name, shape in shapes.items()]
    with torch.no_grad(), recorder:
        load((source.name, recorder.stand_in(source)) for source in loaded)
    return {name: recorder.pieces.get(name, []) for name in shapes}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from placeholder tensors instead of executing them, and follows their slices, copies and
    concatenations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[str, list[Piece]] = {}
        self._held: dict[int, tuple[Tensor, tuple[Part, ...]]] = {}
        """Parts by storage. Kept alive, because a storage is identified by its address."""

    def stand_in(self, source: Source) -> Tensor:
        """A placeholder tensor without values."""
        return self._hold(torch.empty(source.shape, device="meta"), source.parts)

    def parts(self, tensor: Tensor) -> tuple[Part, ...]:
        """The parts of a tensor that come from placeholders; empty if it is not a box of one."""
        held = self._held.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        place = None if held is None else place_of(tensor, held[0])
        if held is None or place is None:
            return ()
        return tuple(part for whole in held[1] if (part := seen(whole, *place)) is not None)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            if args[0].shape == args[1].shape:
                self._note(args[0], self.parts(args[1]))
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].is_meta:
            # Overwritten: the values are no longer those of a canonical tensor.
            self._hold(args[0], ())
        follow = FOLLOWED.get(func)
        if follow is not None and result.is_meta and (parts := follow(self, args, kwargs or {})):
            self._hold(result, parts)
        return result

    def _hold(self, tensor: Tensor, parts: tuple[Part, ...]) -> Tensor:
        self._held[tensor.untyped_storage()._cdata] = (tensor, parts)
        return tensor

    def _note(self, target: Tensor, parts: tuple[Part, ...]) -> None:
        for part in parts:
            memory = target.detach()[part.box.slices(Box.whole(tuple(target.shape)))]
            origin = part.origin()
            # Restores indexed dimensions, with size one.
            strides = [1] * len(origin.size)
            for dim, stride in zip(part.dims, memory.stride(), strict=True):
                if dim is not None:
                    strides[dim] = stride
            memory = memory.as_strided(origin.size, strides, memory.storage_offset())
            self.pieces.setdefault(part.name, []).append(Piece(box=origin, memory=memory))


def _copied(recorder: Recorder, args: Sequence[Any], _: Mapping[str, Any]) -> tuple[Part, ...]:
    return recorder.parts(args[0])


def _joined(recorder: Recorder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Part, ...]:
    """Parts of the result of `cat`."""
    dim, parts, at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)), [], 0
    for tensor in args[0]:
        parts += [part.moved(dim % tensor.dim(), at) for part in recorder.parts(tensor)]
        at += tensor.shape[dim]
    return tuple(parts)


def _stacked(recorder: Recorder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Part, ...]:
    """Parts of the result of `stack`."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return tuple(
        part.stacked(dim % (tensor.dim() + 1), at)
        for at, tensor in enumerate(args[0])
        for part in recorder.parts(tensor)
    )


FOLLOWED: dict[Any, Callable[[Recorder, Sequence[Any], Mapping[str, Any]], tuple[Part, ...]]] = {
    torch.ops.aten.clone.default: _copied,
    torch.ops.aten._to_copy.default: _copied,
    torch.ops.aten.cat.default: _joined,
    torch.ops.aten.stack.default: _stacked,
}
"""Operations that create tensors from unchanged values of others."""
