"""Options of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """What only this backend knows."""

    replicate_size: int = 1
    """Copies of the sharded model (hybrid sharding): ranks are cut into so many groups, each of which shards the whole
    model, and gradients are reduced over both axes. Must divide the number of ranks."""
    reshard_after_forward: bool = True
    """Frees a layer's gathered weights after its forward pass and gathers them again in the backward pass: less memory,
    one more gather."""
    cpu_offload: bool = False
    """Keeps shards, gradients and optimizer on the host; layers are copied to the device as they run."""
