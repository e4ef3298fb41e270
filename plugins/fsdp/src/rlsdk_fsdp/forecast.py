"""What the backend would hold, worked out without a process group: for `rlsdk plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rlsdk.interfaces import (
    Box,
    ConfigError,
    Forecast,
    RankContext,
    RankMemory,
    RolloutSpec,
    TensorMeta,
    TrainSpec,
    WeightLayout,
    Workload,
)
from rlsdk.kit.estimate import pass_bytes, rows_of_pass
from rlsdk.kit.hf import build_model, canonical_parameters
from rlsdk_fsdp.config import WHOLE_GRADIENT_BYTES, FsdpOptions
from rlsdk_fsdp.shards import chunk_of
from rlsdk_fsdp.wrapping import check_sizes, dtypes_of, layers_of

GATHERED_LAYERS = 3
"""Of the largest layer, at the peak: the one that runs, the next one, and the buffer that it arrives in."""


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`."""
    if not isinstance(spec, TrainSpec):
        raise ConfigError(f"backend 'fsdp' is a train backend; got a {type(spec).__name__}")
    options = spec.options if isinstance(spec.options, FsdpOptions) else FsdpOptions()
    check_sizes(contexts[0], options)
    model = build_model(spec.model, empty=True)
    parameters, tied = canonical_parameters(model)
    held, computed = dtypes_of(spec, options)
    layouts = [_layout(ctx, parameters, tied, held, options) for ctx in contexts]
    world = len(contexts)
    rows, passes = rows_of_pass(spec, row_tokens=workload.row_tokens, num_rows=-(-workload.update_rows // world))
    gathered, added = _gathered(model, computed, options)
    trained = spec.optim is not None
    forward, backward = (
        pass_bytes(
            spec.model,
            dtype=computed,
            num_rows=rows,
            row_tokens=workload.row_tokens,
            gradient=gradient,
            activation_checkpointing=spec.activation_checkpointing,
        )
        if gradient <= trained
        else 0
        for gradient in (False, True)
    )
    numel = sum(parameter.numel() for parameter in parameters.values())
    small = 4 * numel <= WHOLE_GRADIENT_BYTES
    whole = passes > 1 and (options.accumulate == "whole" or (options.accumulate == "auto" and small))
    memory = []
    for layout in layouts:
        mine = sum(box.numel for _, box in layout.boxes) * held.itemsize
        memory.append(
            RankMemory(
                weights_bytes=mine,
                optimizer_bytes=2 * mine * trained,
                gradients_bytes=(mine + 4 * numel * whole) * trained,
                forward_bytes=None if forward is None else forward + gathered,
                backward_bytes=None if backward is None else (backward + gathered + added) * trained,
                on_host=options.cpu_offload and contexts[0].device != "cpu",
            )
        )
    return Forecast(layouts=tuple((layout,) for layout in layouts), memory=tuple(memory), dp_size=world)


def _layout(
    ctx: RankContext,
    parameters: Mapping[str, nn.Parameter],
    tied: Mapping[str, str],
    held: torch.dtype,
    options: FsdpOptions,
) -> WeightLayout:
    """As the engine's own."""
    ranks = ctx.world_size // options.replicate_size
    boxes = {name: _box(tuple(parameter.shape), ctx.rank % ranks, ranks) for name, parameter in parameters.items()}
    mine = {name: box for name, box in boxes.items() if box.numel}
    dtype = str(held).removeprefix("torch.")
    return WeightLayout(
        rank=ctx.rank,
        node=ctx.node,
        device="cpu" if options.cpu_offload else ctx.device,
        process="",
        tensors=tuple(TensorMeta(name=name, shape=tuple(parameters[name].shape), dtype=dtype) for name in mine),
        boxes=tuple(mine.items()),
        tied=tied,
    )


def _box(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    if not shape:
        return Box.whole(shape)
    first, rows = chunk_of(shape[0], rank, ranks)
    return Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _gathered(model: nn.Module, computed: torch.dtype, options: FsdpOptions) -> tuple[int, int]:
    """(whole weights that exist during a pass, what their gradients add to it in a backward pass), in bytes."""
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    if options.wrap == "model" or not layers:
        return 2 * total * computed.itemsize, total * (computed.itemsize + 4)
    root, layer = max(total - sum(layers), 0), max(layers)
    kept = sum(layers) if not options.reshard_after_forward else GATHERED_LAYERS * layer
    weights = max(2 * root, root + kept) * computed.itemsize
    # Gradients of a group, and the float32 buffer that they are reduced in.
    return weights, (root + layer) * (computed.itemsize + 4)
