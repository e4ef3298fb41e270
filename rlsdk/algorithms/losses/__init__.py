"""Policy losses: one number per token; the objective weights them by `loss_weight` and sums them.

The ratio is `exp(log_probs - old_log_probs)`; log-ratios are clamped to +-20 before the exponential. Metrics of a ratio
loss: `ratio`, `clip_fraction` (1 where a clip removed the gradient), `approx_kl` (k3 of KL(old || current)).
"""

from __future__ import annotations

from rlsdk.algorithms.losses.clip import ppo_clip
from rlsdk.algorithms.losses.gradient import policy_gradient
from rlsdk.algorithms.losses.sequence import gspo
from rlsdk.algorithms.losses.weighted import cispo, sapo

__all__ = ["cispo", "gspo", "policy_gradient", "ppo_clip", "sapo"]
