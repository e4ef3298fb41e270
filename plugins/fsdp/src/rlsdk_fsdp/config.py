"""Options of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WHOLE_GRADIENT_BYTES = 1 << 30
"""Largest whole float32 gradient in bytes that `accumulate: auto` keeps on every rank."""


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """Options of this backend."""

    replicate_size: int = 1
    """Number of replicas of the sharded model (hybrid sharding): ranks are split into this many groups of neighbours,
    each of which shards the whole model; gradients are summed over all. Must divide the number of ranks."""
    reshard_after_forward: bool = True
    """Frees a layer's gathered weights after its forward pass and gathers them again in the backward pass: less memory,
    one more all-gather."""
    mixed_precision: Literal["auto", "none", "bfloat16"] = "auto"
    """auto: passes run in `model.dtype`, on a rounded copy of float32 weights. none: weights are stored, updated and
    used in `model.dtype`, which loses small updates in bfloat16. bfloat16: as auto, with bfloat16 passes for every
    `model.dtype`. Gradients are always reduced over ranks in float32."""
    accumulate: Literal["auto", "whole", "sharded"] = "auto"
    """Where gradients of several micro-batches are accumulated. whole: on each rank for the whole model, reduced over
    ranks after the last micro-batch: least traffic. sharded: reduced after each micro-batch: least memory. auto: whole
    if the model's float32 gradient is at most 1 GiB."""
    wrap: Literal["layers", "model"] = "layers"
    """Unit of all-gather: one layer, or the whole model (faster for models that fit anyway)."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Runs rows concatenated without padding (always), or padded to a rectangle (never). auto: whichever is cheaper."""
    cpu_offload: bool = False
    """Keeps shards, gradients and optimizer state on the host; layers are copied to the device when they run."""
