"""Loads weights shard by shard into the parameters of a model, and checks that they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlsdk.interfaces import Box, WeightShard, WeightSyncError, nearest
from rlsdk.kit.weights.block_scales import BlockQuantizer


@torch.no_grad()
def load_shards(
    parameters: Mapping[str, Tensor],
    shards: Iterable[WeightShard],
    version: int,
    quantizers: Mapping[str, BlockQuantizer] | None = None,
) -> int:
    """Copies every shard to its place, converting its dtype. Memory stays bounded by one shard.

    A shard that is a view of its own place (engines that share memory hand out such) is not copied.

    Args:
        parameters: canonical name -> what is served.
        shards: boxes that tile every parameter, in any order.
        version: named in errors.
        quantizers: of the parameters that are quantized as they come.

    Returns:
        Bytes that arrived, in the dtype that they are served in, scales not counted.

    Raises:
        WeightSyncError: a tensor is unknown, was sent twice in part, does not fit, or was not covered.
    """
    came: dict[str, list[Box]] = {name: [] for name in parameters}
    num_bytes = 0
    for shard in shards:
        place = _place(parameters, shard, came, version)
        if quantizers and shard.name in quantizers:
            quantizers[shard.name].take(shard)
        elif not _is_same_memory(place, shard.tensor):
            place.copy_(shard.tensor)
        num_bytes += place.numel() * place.element_size()
    lacking = sorted(name for name, p in parameters.items() if sum(box.numel for box in came[name]) < p.numel())
    if lacking:
        raise WeightSyncError(
            f"version {version}: {len(lacking)} of {len(parameters)} tensors were not covered, first {lacking[0]!r}; "
            "an update must cover every box of layout()"
        )
    return num_bytes


def _place(parameters: Mapping[str, Tensor], shard: WeightShard, came: Mapping[str, list[Box]], version: int) -> Tensor:
    """The view of the parameter that a shard fills."""
    parameter = parameters.get(shard.name)
    if parameter is None:
        raise WeightSyncError(
            f"version {version}: {shard.name!r} is not a tensor of this model{nearest(shard.name, parameters)}; it has "
            f"{len(parameters)}, those of layout()"
        )
    whole = Box.whole(tuple(parameter.shape))
    fits = len(shard.box.size) == parameter.dim() and shard.box.intersect(whole) == shard.box
    if not fits or tuple(shard.tensor.shape) != shard.box.size:
        raise WeightSyncError(
            f"version {version}: {shard.name!r} has shape {list(parameter.shape)}; a piece arrived at "
            f"{list(shard.box.offset)} of size {list(shard.box.size)}, with values of shape {list(shard.tensor.shape)}"
        )
    again = next((box for box in came[shard.name] if box.intersect(shard.box) is not None), None)
    if again is not None:
        raise WeightSyncError(
            f"version {version}: {shard.name!r}: the piece at {list(shard.box.offset)} of size {list(shard.box.size)} "
            f"overlaps the one at {list(again.offset)} of size {list(again.size)}"
        )
    came[shard.name].append(shard.box)
    return parameter.detach()[shard.box.slices(whole)]


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.device, a.dtype, a.data_ptr(), a.stride()) == (b.device, b.dtype, b.data_ptr(), b.stride())
