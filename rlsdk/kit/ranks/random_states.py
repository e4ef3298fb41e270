"""States of torch's global random generators of this rank, which a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """By kind of device; `cuda` is the current device's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Restores what `random_states` returned; generators of which there is no state keep their own."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
