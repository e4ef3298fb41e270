"""Forecasts the backend's memory without a process group, for `rlsdk plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from rlsdk.interfaces import Box, Forecast, RankContext, RankMemory, RolloutSpec, TrainSpec, WeightLayout, Workload
from rlsdk.kit.memory.forecast import ModelTensors, count_passes, training
from rlsdk.kit.model.adapters import adapter_shapes
from rlsdk.kit.model.context_parallel import check_model
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.packed import can_pack
from rlsdk_fsdp.config import WHOLE_GRADIENT_BYTES, FsdpOptions
from rlsdk_fsdp.shards import chunk_of
from rlsdk_fsdp.wrapping import check_sizes, dtypes_of, layers_of

GATHERED_LAYERS = 3
"""Number of gathered layers at the peak: the running one, the next one, and its receive buffer."""


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`."""
    spec = training(spec, "fsdp")
    options = spec.options if isinstance(spec.options, FsdpOptions) else FsdpOptions()
    check_sizes(contexts[0], options)
    model = build_model(spec.model, empty=True)
    tensors = ModelTensors.of(model)
    held, computed = dtypes_of(spec, options)
    layouts = [_layout(ctx, tensors, held, options) for ctx in contexts]
    size = options.context_parallel
    check_model(model, size, packs=can_pack(model))
    passes = count_passes(
        spec, workload, dp_size=len(contexts) // size, cp_size=size, dtype=computed, device=contexts[0].device
    )
    adapter = spec.model.adapter
    low = {} if adapter is None else adapter_shapes(model, adapter)
    stepped = tensors.numel if adapter is None else sum(map(math.prod, low.values()))
    small = 4 * stepped <= WHOLE_GRADIENT_BYTES
    whole = passes.count > 1 and (options.accumulate == "whole" or (options.accumulate == "auto" and small))
    gathered, added = _gathered(model, computed, options, keeps_whole=whole)
    added = added if adapter is None else 4 * stepped  # frozen weights have no gradients
    trained, ranks = spec.optim is not None, len(contexts) // options.replicate_size
    # Each rank has its rows of the adapter, and every A whole.
    whole_a = 4 * sum(math.prod(shape) for name, shape in low.items() if ".lora_A." in name)
    forward, backward = passes.forward_bytes, passes.backward_bytes
    memory = []
    for layout in layouts:
        mine = sum(box.numel for _, box in layout.boxes) * held.itemsize
        own = 4 * sum(_box(shape, layout.rank % ranks, ranks).numel for shape in low.values())
        moved = mine if adapter is None else own
        memory.append(
            RankMemory(
                weights_bytes=mine + own + whole_a,
                optimizer_bytes=2 * moved * trained,
                # The last backward pass reduces whole gradients to shards, layer by layer.
                gradients_bytes=max(moved, 4 * stepped * whole) * trained,
                forward_bytes=None if forward is None else forward + gathered,
                backward_bytes=None if backward is None else (backward + gathered + added) * trained,
                on_host=options.cpu_offload and contexts[0].device != "cpu",
            )
        )
    return Forecast(layouts=tuple((layout,) for layout in layouts), memory=tuple(memory), dp_size=len(contexts) // size)


def _layout(ctx: RankContext, tensors: ModelTensors, held: torch.dtype, options: FsdpOptions) -> WeightLayout:
    """The layout, as computed by the engine."""
    ranks = ctx.world_size // options.replicate_size
    boxes = ((name, _box(shape, ctx.rank % ranks, ranks)) for name, shape in tensors.shapes.items())
    mine = ((name, box) for name, box in boxes if box.numel)
    ctx = replace(ctx, device="cpu" if options.cpu_offload else ctx.device)
    return tensors.layout(ctx, str(held).removeprefix("torch."), mine)


def _box(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    if not shape:
        return Box.whole(shape)
    first, rows = chunk_of(shape[0], rank, ranks)
    return Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _gathered(model: nn.Module, computed: torch.dtype, options: FsdpOptions, *, keeps_whole: bool) -> tuple[int, int]:
    """(bytes of whole weights during a pass, additional bytes of their gradients in a backward pass).

    `keeps_whole`: whole gradients are counted elsewhere; only the float32 buffer of their reduction is counted here.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    if options.wrap == "model" or not layers:
        return 2 * total * computed.itemsize, total * ((0 if keeps_whole else computed.itemsize) + 4)
    root, layer = max(total - sum(layers), 0), max(layers)
    kept = sum(layers) if not options.reshard_after_forward else GATHERED_LAYERS * layer
    weights = max(2 * root, root + kept) * computed.itemsize
    # The root's weights stay gathered from the first to the last layer.
    return weights, (0 if keeps_whole else (root + layer) * computed.itemsize) + layer * 4
