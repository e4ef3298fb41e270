"""Policy losses: one number per token, weighed with `loss_weight` and added up by the objective.

A ratio is `exp(log_probs - old_log_probs)`; log-ratios are cut at +-20 before the exponential. Metrics of a ratio loss:
`ratio`, `clip_fraction` (1 where a clip cut the gradient), `approx_kl` (k3 of KL(old || current)).
"""

from __future__ import annotations

from rlsdk.algorithms.losses.clip import ppo_clip
from rlsdk.algorithms.losses.gradient import policy_gradient
from rlsdk.algorithms.losses.sequence import gspo
from rlsdk.algorithms.losses.weighted import cispo, sapo

__all__ = ["cispo", "gspo", "policy_gradient", "ppo_clip", "sapo"]
