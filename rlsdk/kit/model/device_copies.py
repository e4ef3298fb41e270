"""Copies many tensors to an accelerator at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.interfaces import Batch

ALIGNMENT = 16
"""Bytes; the largest that kernels' vectorized loads expect of the start of a tensor."""


def copy_together(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies tensors from the CPU to a device, by one copy from pinned memory that the host does not wait for. On a
    CPU, or with tensors that are on an accelerator already, nothing is copied that need not be."""
    if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    joined = join(tensors, pinned=device.type == "cuda")
    return split(joined.to(device, non_blocking=True), tensors)


def send_batch(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device, with its counts and positions, in one copy."""
    batch = batch.with_places()
    return batch.with_tensors(copy_together(batch.tensors(), device))


def to_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the CPU; those of one shape and dtype by one copy."""
    if len({(tensor.shape, tensor.dtype) for tensor in values.values()}) != 1:
        return {name: tensor.cpu() for name, tensor in values.items()}
    return dict(zip(values, torch.stack(list(values.values())).cpu(), strict=True))


def join(tensors: Mapping[str, Tensor], *, pinned: bool = False) -> Tensor:
    """The values of all tensors in one uint8 tensor, each at a multiple of `ALIGNMENT`."""
    total = sum(map(_padded, tensors.values()))
    joined = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(split(joined, tensors).values(), tensors.values(), strict=True):
        part.copy_(tensor)
    return joined


def split(joined: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the result of `join`, or of a copy of it, with the shapes and dtypes of `like`."""
    found, at = {}, 0
    for name, tensor in like.items():
        held = joined[at : at + tensor.numel() * tensor.element_size()]
        found[name] = held.view(tensor.dtype).view(tensor.shape)
        at += _padded(tensor)
    return found


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
