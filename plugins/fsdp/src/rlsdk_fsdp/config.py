"""Options of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

WHOLE_GRADIENT_BYTES = 1 << 30
"""Largest whole float32 gradient in bytes that `accumulate: auto` keeps on every rank."""


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """Options of this backend."""

    replicate_size: int = 1
    """Number of replicas of the sharded model (hybrid sharding): ranks are split into this many groups of neighbours,
    each of which shards the whole model; gradients are summed over all. Must divide the number of ranks."""
    context_parallel: int = 1
    """Context-parallel size: this many neighbouring ranks run the same rows, each a stretch of their tokens; in
    attention each has all tokens and a share of the heads (Ulysses). For rows whose activations do not fit one device;
    `train.micro_batch_tokens` counts the tokens of all of them. Must divide the number of ranks and that of attention
    heads. Passes are packed."""
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

    def place_problems(self, *, num_ranks: int, device: str, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """See `rlsdk.interfaces.ChecksPlace`."""
        for name in ("replicate_size", "context_parallel"):
            size = getattr(self, name)
            if size < 1 or num_ranks % size:
                valid = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
                rest = f"{num_ranks} = {num_ranks // size} x {size} + {num_ranks % size}" if size > 0 else "below 1"
                yield name, f"{size} does not divide the {num_ranks} ranks ({rest}); expected one of {valid}"
        if self.context_parallel > 1:
            from rlsdk.kit.model.context_parallel import split_problems  # with torch

            yield from (("context_parallel", problem) for problem in split_problems(model, self.context_parallel))
            if self.packing == "never":
                yield (
                    "packing",
                    f"'never', and context_parallel {self.context_parallel} splits packed rows; expected 'auto' or "
                    "'always'",
                )
