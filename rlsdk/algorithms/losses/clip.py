"""The clipped surrogate of PPO, per token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms.losses.ratio import check_clips, ratio_metrics, token_log_ratio
from rlsdk.interfaces import ConfigError, PolicyLossInputs


def ppo_clip(
    inputs: PolicyLossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The clipped surrogate: `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with r = exp(log_probs - old).

    PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7). A `clip_high` above `clip_low` is DAPO's clip-higher (Yu
    et al. 2025, arXiv 2503.14476, equation 10). Log-ratios are clamped to +-20 before the exponential.

    Args:
        inputs: inputs of one micro-batch.
        clip_low: a token with negative advantage has no gradient if its ratio is below 1 - clip_low; in (0, 1].
        clip_high: a token with positive advantage has no gradient if its ratio is above 1 + clip_high; above 0.
        dual_clip: c > 1 bounds the loss of tokens with negative advantage at `c * -A`: dual-clip PPO (Ye et al. 2020,
            arXiv 1912.09729, equation 5). None: no bound.

    Returns:
        loss `[N]`, and metrics `[N]`: `ratio`, `clip_fraction`, `approx_kl`.

    Raises:
        ConfigError: a bound is outside its range.
    """
    check_clips(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip is {dual_clip!r}: expected a number above 1, such as 3.0, or None")
    log_ratio = token_log_ratio(inputs)
    ratio = log_ratio.exp()
    loss, is_cut = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = torch.where(inputs.advantages < 0, -inputs.advantages * dual_clip, torch.inf)
        is_cut = is_cut | (loss > bound)
        loss = torch.minimum(loss, bound)
    return loss, ratio_metrics(log_ratio, ratio, is_cut)


ppo_clip.zero_without_advantage = True  # type: ignore[attr-defined]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Returns the loss `[N]`, and `[N]` bool: where the clip removed the gradient."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, clipped), clipped > free
