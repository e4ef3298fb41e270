"""What each rank holds of a parameter, and where that lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rlsdk.interfaces import Box, LayoutError


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter."""

    name: str
    """Canonical."""
    parameter: nn.Parameter
    """What FSDP gathers: a DTensor of the whole shape."""
    box: Box
    """Of size 0 where there are more ranks than rows."""
    held: nn.Parameter
    """This rank's memory of it, as a plain tensor: what the optimizer steps, with no dispatch over DTensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def take_gradient(self) -> None:
        """Shows the optimizer what FSDP reduced.

        Raises:
            LayoutError: FSDP moved the parameter to other memory, so that steps on `held` would be lost.
        """
        if local(self.parameter).data_ptr() != self.held.data_ptr():
            raise LayoutError(f"FSDP moved {self.name!r} to other memory after `initialize`; its shards are stale")
        gradient = self.parameter.grad
        self.held.grad = None if gradient is None else local(gradient)

    def drop_gradient(self) -> None:
        self.parameter.grad = self.held.grad = None

    def whole(self) -> Tensor:
        """The full tensor, gathered on the mesh's device. Every rank must call."""
        values = self.held.detach()
        if not isinstance(self.parameter, DTensor):
            return values
        # Shards that live on the host of a GPU would need a group that moves CPU tensors.
        part = self.like(values.to(self.parameter.device_mesh.device_type))
        return part.full_tensor() if isinstance(part, DTensor) else part

    def like(self, values: Tensor) -> Tensor:
        """`values` of this rank's box as a part of a whole, cut as the parameter is."""
        if not isinstance(self.parameter, DTensor):
            return values
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        shape, stride = self.parameter.shape, self.parameter.stride()
        return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def fill(self, whole_or_part: Tensor) -> None:
        """Takes this rank's values out of a tensor of the box's size or of the whole shape."""
        same = tuple(whole_or_part.shape) == self.box.size
        self.held.copy_(whole_or_part if same else whole_or_part[self.box.slices(Box.whole(self.shape))])


def pieces_of(parameters: Mapping[str, nn.Parameter]) -> list[Piece]:
    """What this rank holds of each parameter, in the order given."""
    return [
        Piece(name, p, box_of(name, p), nn.Parameter(local(p.detach()), requires_grad=p.requires_grad))
        for name, p in parameters.items()
    ]


def box_of(name: str, parameter: Tensor) -> Box:
    """The box of the whole tensor that this rank holds: rows are dealt in chunks of ceil(rows / ranks).

    Raises:
        LayoutError: the tensor is cut in another way than FSDP's, or memory and arithmetic disagree.
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
            raise LayoutError(f"{name!r} is placed as {placement}; expected whole or cut along one dimension")
    if tuple(local(parameter).shape) != tuple(size):
        raise LayoutError(f"this rank holds {tuple(local(parameter).shape)} of {name!r}, expected {tuple(size)}")
    return Box(tuple(offset), tuple(size))


def chunk_of(rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First of a rank's rows, and how many they are: chunks of ceil(rows / ranks), the last ones smaller or empty."""
    chunk = -(-rows // num_ranks)
    first = min(chunk * rank, rows)
    return first, min(chunk, rows - first)


def local(tensor: Tensor) -> Tensor:
    """This rank's part: a view of its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
