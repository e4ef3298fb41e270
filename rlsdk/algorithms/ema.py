"""Exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.interfaces import ConfigError


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """`average <- decay * average + (1 - decay) * weights`, in place and name by name.

    Keep the average in float32: in bfloat16 a change of less than 0.4 % of a weight is lost to rounding, and at decay
    0.999 all changes are smaller.

    Args:
        average: the tensors to update; any float dtype.
        weights: tensors of the same names and shapes; cast to the average's dtype.
        decay: in [0, 1]; 0 copies the weights.

    Raises:
        ConfigError: `decay` is outside [0, 1], or the names differ.
    """
    if not 0 <= decay <= 1:
        raise ConfigError(f"ema decay is {decay!r}: expected a number in [0, 1], such as 0.999")
    odd = sorted(average.keys() ^ weights.keys())
    if odd:
        raise ConfigError(f"average and weights differ in {len(odd)} names, the first {odd[:3]}")
    for name, mean in average.items():
        mean.lerp_(weights[name].to(mean.dtype), 1 - decay)
