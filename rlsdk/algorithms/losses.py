"""Policy losses: one number per token, to be weighed with `loss_weight` and added up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO, k3
from rlsdk.interfaces import ConfigError, PolicyLossInputs


def ppo_clip(
    inputs: PolicyLossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The clipped surrogate: `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with r = exp(log_probs - old).

    PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7). A `clip_high` above `clip_low` is DAPO's clip-higher (Yu
    et al. 2025, arXiv 2503.14476, equation 10). Log-ratios are cut at +-20 before the exponential.

    Args:
        inputs: of one micro-batch.
        clip_low: how far below 1 the ratio may fall before a negative advantage stops pushing; in (0, 1].
        clip_high: how far above 1 it may rise before a positive advantage stops pushing; above 0.
        dual_clip: bound c > 1 on the loss of tokens with negative advantage, at `c * -A`: dual-clip PPO (Ye et al.
            2020, arXiv 1912.09729, equation 5). None: no bound.

    Returns:
        loss `[N]`, and metrics `[N]`: `ratio`, `clip_fraction` (1 where a clip cut the gradient), `approx_kl` (k3 of
        KL(old || current)).

    Raises:
        ConfigError: a bound outside its range.
    """
    _check_clips(clip_low, clip_high, dual_clip)
    log_ratio = torch.where(inputs.mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, clipped)
    is_cut = clipped > free
    if dual_clip is not None:
        bound = torch.where(inputs.advantages < 0, -inputs.advantages * dual_clip, torch.inf)
        is_cut = is_cut | (loss > bound)
        loss = torch.minimum(loss, bound)
    with torch.no_grad():
        metrics = {
            "ratio": ratio.detach(),
            "clip_fraction": is_cut.float(),
            "approx_kl": k3(torch.zeros_like(log_ratio), log_ratio),
        }
    return loss, metrics


ppo_clip.zero_without_advantage = True  # type: ignore[attr-defined]


def _check_clips(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 < clip_low <= 1:
        raise ConfigError(f"clip_low is {clip_low!r}: expected a number above 0 and at most 1, such as 0.2")
    if not clip_high > 0:
        raise ConfigError(f"clip_high is {clip_high!r}: expected a number above 0, such as 0.2")
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip is {dual_clip!r}: expected a number above 1, such as 3.0, or None")
