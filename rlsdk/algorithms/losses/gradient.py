"""The plain policy gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms.losses.ratio import ratio_metrics, token_log_ratio
from rlsdk.interfaces import PolicyLossInputs


def policy_gradient(inputs: PolicyLossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes `-A log p`, without ratio or clip.

    The loss of REINFORCE (Williams 1992) and of GPG (Chu et al. 2025, arXiv 2504.02546). Correct for one update on
    samples of the same weights; nothing limits the drift of later updates.

    Args:
        inputs: inputs of one micro-batch. `old_log_probs` are only used in the metrics.

    Returns:
        loss `[N]`, and metrics `[N]`: `ratio`, `clip_fraction` (0), `approx_kl`.
    """
    with torch.no_grad():
        log_ratio = token_log_ratio(inputs)
        metrics = ratio_metrics(log_ratio, log_ratio.exp(), torch.zeros_like(inputs.mask))
    return -inputs.advantages * inputs.log_probs, metrics


policy_gradient.zero_without_advantage = True  # type: ignore[attr-defined]
policy_gradient.on_policy_only = True  # type: ignore[attr-defined]
