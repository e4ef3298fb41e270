"""Options of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WHOLE_GRADIENT_BYTES = 1 << 30
"""`accumulate: auto` keeps a whole float32 gradient on every rank up to this size."""


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """What only this backend knows."""

    replicate_size: int = 1
    """Copies of the sharded model (hybrid sharding): ranks are cut into so many groups of neighbours, each of which
    shards the whole model; gradients are added up over all. Must divide the number of ranks."""
    reshard_after_forward: bool = True
    """Frees a layer's gathered weights after its forward pass and gathers them again in the backward pass: less memory,
    one more gather."""
    mixed_precision: Literal["auto", "none", "bfloat16"] = "auto"
    """auto: passes run in `model.dtype`, on a rounded copy of float32 weights. none: weights are held, stepped and run
    in `model.dtype`, which loses small steps in bfloat16. bfloat16: as auto, with bfloat16 passes whatever
    `model.dtype` says. Gradients are added up over ranks in float32 in every case."""
    accumulate: Literal["auto", "whole", "sharded"] = "auto"
    """Where gradients of several micro-batches are added. whole: on each rank for the whole model, reduced over ranks
    after the last micro-batch: least traffic. sharded: reduced after each micro-batch: least memory. auto: whole where
    the model's float32 gradient takes at most 1 GiB."""
    wrap: Literal["layers", "model"] = "layers"
    """What is gathered at a time: one layer, or the whole model (quicker for models that fit anyway)."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Rows run end to end, without padding (always), or padded to a rectangle (never). auto: whichever is cheaper."""
    cpu_offload: bool = False
    """Keeps shards, gradients and optimizer on the host; layers are copied to the device as they run."""
