"""Losses that weight tokens by their ratio, instead of removing the gradient of clipped tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms.losses.ratio import ratio_metrics, token_log_ratio
from rlsdk.interfaces import ConfigError, PolicyLossInputs


def cispo(
    inputs: PolicyLossInputs, *, clip_low: float | None = None, clip_high: float = 4.0
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes `-A clip(r, 1 - clip_low, 1 + clip_high) log p`, without gradient through the ratio.

    So every token keeps a gradient. CISPO (MiniMax-M1, Chen et al. 2025, arXiv 2506.13585), equations 4 and 5.

    Args:
        inputs: inputs of one micro-batch.
        clip_low: the weight is at least 1 - clip_low, in (0, 1]; None: no lower bound, as in the paper.
        clip_high: the weight is at most 1 + clip_high; above 0. The paper tunes it and gives no number; 4.0 bounds the
            weight at 5, as ScaleRL (arXiv 2510.13786) and TRL recommend.

    Returns:
        loss `[N]`, and metrics `[N]`: `ratio` (before the clip), `clip_fraction` (where the weight was clipped),
        `approx_kl`.

    Raises:
        ConfigError: a bound is outside its range.
    """
    if clip_low is not None and not 0 < clip_low <= 1:
        raise ConfigError(f"clip_low is {clip_low!r}: expected a number above 0 and at most 1, or None")
    if not clip_high > 0:
        raise ConfigError(f"clip_high is {clip_high!r}: expected a number above 0, such as 4.0")
    log_ratio = token_log_ratio(inputs)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low if clip_low is not None else 0.0, 1 + clip_high)
    return -inputs.advantages * weight * inputs.log_probs, ratio_metrics(log_ratio, ratio, weight != ratio)


cispo.zero_without_advantage = True  # type: ignore[attr-defined]


def sapo(
    inputs: PolicyLossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes `-A (4 / tau) sigmoid(tau (r - 1))`: a soft gate instead of the clip, with slope 1 at r = 1.

    Soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347). The gradient of tokens far off policy fades
    smoothly; with negative advantage it fades sooner, because of a larger tau.

    Args:
        inputs: inputs of one micro-batch.
        tau_positive: sharpness of the gate for tokens with an advantage above 0; above 0.
        tau_negative: sharpness of the gate for the other tokens; above 0.

    Returns:
        loss `[N]`, and metrics `[N]`: `ratio`, `clip_fraction` (where the gate passes less than half of the gradient),
        `approx_kl`.

    Raises:
        ConfigError: a tau is not above 0.
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not tau > 0:
            raise ConfigError(f"{name} is {tau!r}: expected a number above 0, such as 1.0")
    log_ratio = token_log_ratio(inputs)
    ratio = log_ratio.exp()
    sharpness = torch.where(inputs.advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    gate = torch.sigmoid(sharpness * (ratio - 1))
    with torch.no_grad():
        faded = 4 * gate * (1 - gate) < 0.5
    return -inputs.advantages * gate * 4 / sharpness, ratio_metrics(log_ratio, ratio, faded)


sapo.zero_without_advantage = True  # type: ignore[attr-defined]
