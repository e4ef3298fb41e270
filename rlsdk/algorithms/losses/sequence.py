"""Losses with one ratio per response."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO
from rlsdk.algorithms.losses.clip import clipped_surrogate
from rlsdk.algorithms.losses.ratio import check_clips, ratio_metrics, token_log_ratio
from rlsdk.algorithms.reductions import Samples
from rlsdk.interfaces import PolicyLossInputs


def gspo(
    inputs: PolicyLossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The clipped surrogate with the ratio of the response, `s = exp(mean over its tokens of the log-ratio)`.

    GSPO (Zheng et al. 2025, arXiv 2507.18071), in the form GSPO-token (equations 13 and 14): each token's ratio has the
    value s, but only the gradient of its own log-prob, so advantages may differ between tokens. If they do not, it is
    GSPO (equation 5). Use it with the loss aggregation `sequence_mean`. The mean does not include tool tokens.

    Args:
        inputs: inputs of one micro-batch.
        clip_low: s is clipped below 1 - clip_low; the paper's bounds are this narrow because s is a mean.
        clip_high: s is clipped above 1 + clip_high.

    Returns:
        loss `[N]`, and metrics `[N]`: `ratio` (s), `clip_fraction`, `approx_kl` (of tokens).

    Raises:
        ConfigError: a bound is outside its range.
    """
    check_clips(clip_low, clip_high)
    log_ratio = token_log_ratio(inputs)
    samples = Samples.of(inputs.batch)
    of_sample = samples.token_mean(log_ratio.detach(), inputs.mask)[samples.of_token]
    # It has the value of the sample's ratio, and the gradient of the token's log-prob.
    ratio = (of_sample + inputs.log_probs - inputs.log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, is_cut = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    return loss, ratio_metrics(log_ratio, ratio, is_cut)


gspo.zero_without_advantage = True  # type: ignore[attr-defined]
gspo.whole_samples = True  # type: ignore[attr-defined]
