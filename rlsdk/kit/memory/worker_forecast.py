"""Forecasts, from a decoder's configuration, what each worker of a rollout engine holds, for engines whose workers
receive their own parts.

The split is vLLM's: tensor parallelism splits heads, inner dimensions and the padded vocabulary; pipeline stages have
whole layers; experts are split, or distributed, over all ranks of a stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rlsdk.interfaces import Box, RankContext, RolloutSpec, WeightLayout
from rlsdk.kit.memory.forecast import ModelTensors

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")
"""Modules that are split by output features."""
COLUMNS = ("o_proj", "down_proj")
"""Modules that are split by input features; their bias is replicated."""
VOCABULARY = ("embed_tokens", "lm_head")
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "gate", "shared_expert_gate", "sinks")
"""Replicated modules besides norms."""
VOCABULARY_PAD = 64
"""Vocabulary rows are padded to a multiple of this before they are split."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def worker_layouts(
    tensors: ModelTensors,
    config: Any,
    ctx: RankContext,
    spec: RolloutSpec,
    *,
    pad: int = VOCABULARY_PAD,
    on_their_nodes: bool = False,
) -> tuple[WeightLayout, ...] | None:
    """One layout per worker of a replica; None if it is unknown how some tensor of the model is split.

    Args:
        tensors: of the model.
        config: its transformers configuration.
        ctx: of the replica.
        spec: has the parallel sizes.
        pad: the vocabulary is padded to a multiple of this.
        on_their_nodes: on CPUs too, workers start on the nodes of `ctx`. False: the replica's process starts them all.
    """
    text = config.get_text_config()
    layouts = []
    for worker in range(spec.num_devices):
        part = _Part(tensors.shapes, text, spec, worker, pad)
        try:
            boxes = [(name, box) for name in tensors.shapes for box in part.boxes(name) if box.numel]
        except _UnknownTensorError:
            return None
        if spec.pp_size > 1 and tensors.tied and part.is_last and not part.is_first:
            boxes += [(name, box) for name in tensors.tied.values() for box in part.cut(name)]
        device = ctx.device if ctx.device == "cpu" else f"{ctx.device.partition(':')[0]}:{worker}"
        apart = ctx.device_nodes and (on_their_nodes or ctx.device != "cpu")
        node = ctx.device_nodes[worker] if apart else ctx.node
        layout = tensors.layout(replace(ctx, device=device, node=node), spec.model.dtype, boxes)
        name = f"worker {worker}"
        process = f"{node}:{ctx.role} {ctx.rank} {name}"
        layouts.append(replace(layout, rank=worker, process=process, worker=name, is_apart=node != ctx.node))
    return tuple(layouts)


class _UnknownTensorError(Exception):
    """It is unknown how the tensor is split."""


class _Part:
    """The part of one worker."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], config: Any, spec: RolloutSpec, worker: int, pad: int
    ) -> None:
        self._shapes = shapes
        self._config = config
        self._tp, self._tp_rank, self._pad = spec.tp_size, worker % spec.tp_size, pad
        stage = worker // spec.tp_size % spec.pp_size
        self.is_first, self.is_last = stage == 0, stage == spec.pp_size - 1
        self._layers = _stages(config.num_hidden_layers, spec.pp_size)[stage]
        copy = worker // (spec.tp_size * spec.pp_size)
        self._experts = spec.tp_size * spec.dp_size, copy * spec.tp_size + self._tp_rank
        """(number of ranks that share experts, index of this one)."""
        self._dealt = spec.ep_size > 1

    def boxes(self, name: str) -> Iterator[Box]:
        """Boxes of a tensor that it holds.

        Raises:
            _UnknownTensorError: it is unknown how the tensor is split.
        """
        layer = _LAYER.search(name)
        if layer is not None:
            here = int(layer[1]) in self._layers
        else:
            here = self.is_first if "embed" in name else self.is_last
        yield from self.cut(name) if here else self._checked(name)

    def cut(self, name: str) -> Iterator[Box]:
        """As `boxes`, if the stage has the layer."""
        if ".experts" in name:
            yield from self._of_experts(name)
            return
        shape, parts = self._shapes[name], name.split(".")
        module, kind = parts[-2], parts[-1]
        if len(shape) == 1 and ("norm" in module or kind == "e_score_correction_bias"):
            yield Box.whole(shape)
        elif module in VOCABULARY:
            padded = -(-shape[0] // self._pad) * self._pad
            yield _share(shape, 0, -(-padded // self._tp), self._tp_rank)
        elif module in ROWS:
            heads = self._config.num_key_value_heads if module in ("k_proj", "v_proj") else self._tp
            yield _share(shape, 0, shape[0] // min(heads, self._tp), self._tp_rank * min(heads, self._tp) // self._tp)
        elif module in COLUMNS and kind == "weight":
            yield _share(shape, 1, shape[1] // self._tp, self._tp_rank)
        elif module in COLUMNS or module in WHOLE or "norm" in module:
            yield Box.whole(shape)
        else:
            raise _UnknownTensorError(name)

    def _checked(self, name: str) -> Iterator[Box]:
        """No boxes, after a check that the split is known."""
        for _ in self.cut(name):
            break
        yield from ()

    def _of_experts(self, name: str) -> Iterator[Box]:
        shape, (ranks, rank) = self._shapes[name], self._experts
        alone = _EXPERT.search(name)
        if alone is not None:
            count = next(int(getattr(self._config, key)) for key in EXPERT_COUNTS if hasattr(self._config, key))
            if self._dealt:
                yield from (Box.whole(shape),) if int(alone[1]) in _dealt(count, ranks)[rank] else ()
            else:
                dim = 1 if name.split(".")[-2] in COLUMNS else 0
                yield _share(shape, dim, shape[dim] // ranks, rank)
            return
        kind = name.split(".")[-1]
        if kind not in ("gate_up_proj", "down_proj") or len(shape) != 3:
            raise _UnknownTensorError(name)
        if self._dealt:
            mine = _dealt(shape[0], ranks)[rank]
            yield Box((mine.start, 0, 0), (len(mine), *shape[1:]))
        elif kind == "down_proj":
            yield _share(shape, 2, shape[2] // ranks, rank)
        else:
            # Rows of the gate, then those of the up projection.
            inner = shape[1] // 2
            for first in (0, inner):
                size = inner // ranks
                yield Box((0, first + rank * size, 0), (shape[0], size, shape[2]))


EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in configurations."""


def _share(shape: tuple[int, ...], dim: int, size: int, rank: int) -> Box:
    """Part `rank` of size `size` along a dimension, up to its end."""
    low, high = min(shape[dim], rank * size), min(shape[dim], (rank + 1) * size)
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = low, high - low
    return Box(tuple(offset), tuple(extent))


def _stages(layers: int, count: int) -> list[range]:
    """Number of layers of each stage; remaining layers go to the last stages except the very last, from the back."""
    sizes = [layers // count] * count
    for at in range(2, layers % count + 2):
        sizes[-at] += 1
    ends = [sum(sizes[:at]) for at in range(count + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _dealt(experts: int, ranks: int) -> list[range]:
    """Experts of each rank; the first ranks have one more if the number does not divide."""
    base, more = divmod(experts, ranks)
    ends = [at * base + min(at, more) for at in range(ranks + 1)]
    return [range(first, last) for first, last in pairwise(ends)]
