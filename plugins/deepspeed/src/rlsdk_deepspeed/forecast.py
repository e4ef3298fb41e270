"""Forecasts the backend's memory without a process group, for `rlsdk plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rlsdk.interfaces import Box, Forecast, Head, RankContext, RankMemory, RolloutSpec, TrainSpec, Workload
from rlsdk.kit.memory.forecast import ModelTensors, count_passes, training
from rlsdk.kit.model.adapters import adapter_shapes
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import layers_above
from rlsdk.kit.weights.flat_boxes import boxes_of_range
from rlsdk_deepspeed.shards import Range, split
from rlsdk_deepspeed.sizes import check_options, dtype_of, options_of


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`."""
    spec = training(spec, "deepspeed")
    options = options_of(spec)
    check_options(options)
    model = build_model(spec.model, empty=True)
    tensors, computed, trained = ModelTensors.of(model), dtype_of(spec), spec.optim is not None
    low = {} if spec.model.adapter is None else adapter_shapes(model, spec.model.adapter)
    held = torch.float32 if trained and not low else computed
    stage = options.zero_stage if trained or options.zero_stage == 3 else 0
    # With ZeRO 1 and 2, weights below an adapter are whole on each rank, as those of a frozen model.
    ranges = _ranges(tensors.shapes, 0 if low and stage < 3 else stage, len(contexts))
    layouts = []
    for ctx in contexts:
        mine = {name: boxes_of_range(tensors.shapes[name], *ends[ctx.rank]) for name, ends in ranges.items()}
        boxes: list[tuple[str, Box]] = [(name, box) for name in tensors.shapes for box in mine[name]]
        layouts.append(tensors.layout(ctx, str(held).removeprefix("torch."), boxes))
    passes = count_passes(spec, workload, dp_size=len(contexts), dtype=computed)
    gathered = _gathered(model, spec.model.head) * computed.itemsize if stage == 3 else 0
    stepped = low or tensors.shapes
    step_ranges, num_stepped = _ranges(stepped, stage, len(contexts)), sum(map(math.prod, stepped.values()))
    reduced = 2 * num_stepped * (4 if low else computed.itemsize)
    forward, backward = passes.forward_bytes, passes.backward_bytes
    memory = []
    for layout in layouts:
        own = sum(ends[layout.rank][1] - ends[layout.rank][0] for ends in step_ranges.values())
        below = sum(box.numel for _, box in layout.boxes) * held.itemsize
        if low:  # whole, as passes compute with it; and this rank's part, where the whole is split
            # With ZeRO 3 twice: that which is stepped, and that which passes gather the whole from.
            parts = 2 if stage == 3 and trained and len(contexts) > 1 else 1
            copies = 4 * (num_stepped + (parts * own if stage else 0))
        else:
            copies = _copies(num_stepped, own, stage, computed, trained)
        memory.append(
            RankMemory(
                weights_bytes=below + copies,
                optimizer_bytes=8 * own * trained,
                gradients_bytes=4 * (num_stepped if stage == 1 else own) * trained,
                forward_bytes=None if forward is None else forward + gathered,
                # Gradients of a pass are copied into one buffer, which is reduced.
                backward_bytes=None if backward is None else (backward + gathered + reduced) * trained,
                on_host=False,
            )
        )
    return Forecast(layouts=tuple((layout,) for layout in layouts), memory=tuple(memory), dp_size=len(contexts))


def _ranges(shapes: Mapping[str, tuple[int, ...]], stage: int, world: int) -> dict[str, list[Range]]:
    """Each rank's range of every parameter: weights with and without decay are flattened apart."""
    decayed = {name: shape for name, shape in shapes.items() if len(shape) >= 2}
    plain = {name: shape for name, shape in shapes.items() if len(shape) < 2}
    return {**split(decayed, stage, world), **split(plain, stage, world)}


def _copies(total: int, stepped: int, stage: int, computed: torch.dtype, trained: bool) -> int:
    """Bytes of the weights that passes run on, where they are not those that the optimizer steps."""
    if not trained or (stage == 3 and computed is torch.float32):
        return 0
    return (stepped if stage == 3 else total) * computed.itemsize


def _gathered(model: nn.Module, head: Head) -> int:
    """Elements that ZeRO 3 gathers at once, at least: the layers above the backbone of a language model, and of the
    other weights those of the module with the most parameters of its own."""
    above = {p for layer in (layers_above(model) if head is Head.LM else ()) for p in layer.parameters()}
    own = (sum(p.numel() for p in module.parameters(recurse=False) if p not in above) for module in model.modules())
    return sum(p.numel() for p in above) + max(own)
