"""Options of the backend `deepspeed`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """Options of this backend."""

    zero_stage: Literal[1, 2, 3] = 2
    """What is split over ranks. 1: optimizer state and the float32 weights that it updates. 2: gradients, too. 3: the
    weights that passes run on, too, gathered module by module. A frozen model is whole on each rank but with 3."""
    offload_optimizer: bool = False
    """Keeps float32 weights and optimizer state on the host, and steps there."""
    offload_param: bool = False
    """Keeps the split weights of passes on the host; modules are copied to the device when they run. Needs
    `zero_stage` 3."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Runs rows concatenated without padding (always), or padded to a rectangle (never). auto: whichever is cheaper."""
