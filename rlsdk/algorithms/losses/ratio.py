"""Common parts of ratio losses: the ratio, its metrics, and the check of clip bounds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO, k3
from rlsdk.interfaces import ConfigError, PolicyLossInputs


def token_log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """Returns `[N]`: log-ratio of current to old policy, clamped to +-20; 0 outside of the mask. Differentiable."""
    difference = torch.where(inputs.mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def ratio_metrics(log_ratio: Tensor, ratio: Tensor, is_cut: Tensor) -> Mapping[str, Tensor]:
    """Returns metrics `[N]` of a ratio loss. `log_ratio` is per token, even if the loss uses one ratio per sample."""
    log_ratio = log_ratio.detach()
    return {
        "ratio": ratio.detach(),
        "clip_fraction": is_cut.float(),
        "approx_kl": k3(torch.zeros_like(log_ratio), log_ratio),
    }


def check_clips(clip_low: float, clip_high: float) -> None:
    """Raises `ConfigError` if a bound is outside its range."""
    if not 0 < clip_low <= 1:
        raise ConfigError(f"clip_low is {clip_low!r}: expected a number above 0 and at most 1, such as 0.2")
    if not clip_high > 0:
        raise ConfigError(f"clip_high is {clip_high!r}: expected a number above 0, such as 0.2")
