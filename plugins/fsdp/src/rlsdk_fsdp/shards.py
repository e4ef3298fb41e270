"""Where each rank's part of a parameter lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlsdk.interfaces import Box


def box_of(parameter: Tensor) -> Box:
    """The box of the canonical tensor that this rank holds; of size 0 where there are more ranks than rows."""
    if not isinstance(parameter, DTensor):
        return Box.whole(tuple(parameter.shape))
    size, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(tuple(offset), tuple(size))


def local(tensor: Tensor) -> Tensor:
    """This rank's part: a view of its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Box, Tensor]]:
    """Name, box and values of everything this rank holds; empty parts are left out."""
    for name, parameter in parameters.items():
        box = box_of(parameter)
        if box.numel:
            yield name, box, local(parameter.detach())


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Puts values of this rank's box into its memory."""
    target = local(parameter)
    if target.numel():
        target.copy_(values)
