"""Shards of parameters: each rank's part, and its position in the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rlsdk.interfaces import Box, LayoutError


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter."""

    name: str
    """Canonical name."""
    parameter: nn.Parameter
    """The DTensor that FSDP gathers, with the whole shape."""
    box: Box
    """Box of this rank's rows; empty if there are more ranks than rows."""
    held: nn.Parameter
    """This rank's memory as a plain tensor: the optimizer updates it, without DTensor dispatch."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def boxes(self) -> Sequence[Box]:
        return (self.box,) if self.box.numel else ()

    @property
    def parts(self) -> Sequence[tuple[Box, Tensor]]:
        """This rank's rows, if it has any: their box, and a view of them."""
        return tuple((box, self.held.detach()) for box in self.boxes)

    def take_gradient(self) -> None:
        """Passes the gradient that FSDP reduced to the optimizer.

        Raises:
            LayoutError: FSDP moved the parameter to other memory, so that updates of `held` would be lost.
        """
        if local(self.parameter).data_ptr() != self.held.data_ptr():
            raise LayoutError(f"FSDP moved {self.name!r} to other memory after `initialize`; its shards are stale")
        gradient = self.parameter.grad
        self.held.grad = None if gradient is None else local(gradient)

    def drop_gradient(self) -> None:
        self.parameter.grad = self.held.grad = None

    def gather(self, writer: int, dtype: torch.dtype) -> Tensor | None:
        """Gathers the full tensor in `dtype` on rank `writer`; None on the others. Collective: every rank must call;
        ranks of replicas other than the writer's do nothing."""
        values, parameter = self.held.detach(), self.parameter
        if not isinstance(parameter, DTensor):
            return values.to(dtype) if dist.get_rank() == writer else None
        mesh = parameter.device_mesh
        axis = mesh.ndim - 1
        group = mesh.get_group(axis)
        if writer not in dist.get_process_group_ranks(group):
            return None
        (placement,) = {place for place in parameter.placements if isinstance(place, Shard)}
        # Equal chunks of raw bytes, the last ones padded: every backend can gather these, for any dtype.
        chunk = chunk_of(self.shape[placement.dim], 0, mesh.size(axis))[1]
        rows = values.to(mesh.device_type, dtype).movedim(placement.dim, 0)
        mine = rows.new_zeros((chunk, *rows.shape[1:]))
        mine[: len(rows)] = rows
        whole = mine.new_empty((mesh.size(axis) * chunk, *rows.shape[1:])) if dist.get_rank() == writer else None
        into = None if whole is None else [_bytes(part) for part in whole.chunk(mesh.size(axis))]
        dist.gather(_bytes(mine), into, dst=writer, group=group)
        return None if whole is None else whole[: self.shape[placement.dim]].movedim(0, placement.dim)

    def everywhere(self) -> Tensor:
        """The whole tensor on every rank. Collective: every rank must call."""
        parameter = self.parameter.detach()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else self.held.detach()

    def like(self, values: Tensor) -> Tensor:
        """`values` of this rank's box as a DTensor, sharded like the parameter."""
        if not isinstance(self.parameter, DTensor):
            return values
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        shape, stride = self.parameter.shape, self.parameter.stride()
        return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def fill(self, box: Box, values: Tensor) -> None:
        """Copies the values of this rank's box."""
        self.held.copy_(values)


def pieces_of(parameters: Mapping[str, nn.Parameter]) -> list[Piece]:
    """The pieces of this rank, in the given order."""
    return [
        Piece(name, p, box_of(name, p), nn.Parameter(local(p.detach()), requires_grad=p.requires_grad))
        for name, p in parameters.items()
    ]


def box_of(name: str, parameter: Tensor) -> Box:
    """The box of this rank: rows are split into chunks of ceil(rows / ranks).

    Raises:
        LayoutError: the tensor is not sharded in FSDP's way, or memory and arithmetic disagree.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Box.whole(shape)
    offset, size = [0] * len(shape), list(shape)
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            dim, mesh = placement.dim, parameter.device_mesh
            offset[dim], size[dim] = chunk_of(shape[dim], mesh.get_local_rank(axis), mesh.size(axis))
        elif not placement.is_replicate():
            raise LayoutError(f"{name!r} has placement {placement}; expected it whole or sharded along one dimension")
    if tuple(local(parameter).shape) != tuple(size):
        raise LayoutError(f"this rank holds {tuple(local(parameter).shape)} of {name!r}, expected {tuple(size)}")
    return Box(tuple(offset), tuple(size))


def chunk_of(rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row of a rank, and its number of rows: chunks of ceil(rows / ranks), the last ones smaller or empty."""
    chunk = -(-rows // num_ranks)
    first = min(chunk * rank, rows)
    return first, min(chunk, rows - first)


def local(tensor: Tensor) -> Tensor:
    """This rank's part: a view of its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
