"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens.

Schulman, "Approximating KL divergence" (2020). With d = log policy - log reference, tokens sampled from the policy:

| name | value | as a number (reward, metric) | as a loss (differentiated) |
|---|---|---|---|
| k1 | d | unbiased, high variance, may be negative | refused: its expected gradient is zero |
| k2 | d^2 / 2 | biased, low variance | expected gradient is that of KL(policy, reference), as intended |
| k3 | exp(-d) - 1 + d | unbiased where d >= -5, never negative | gradient of KL(reference, policy); GRPO's choice |
| low_var_kl | k3, at most 10 | as k3, and bounded | as k3, but no gradient where it is clamped, d < -2.6 |
| abs | abs(d) | a distance, not a KL | bounded gradient |

At d = -20 the exponential of k3 would reach 4.9e8, and one token would dominate the step. So below d = -5, k3 continues
as its tangent: value (2353 at -20) and slope (-147) stay bounded, and the slope never vanishes or changes sign.

For a penalty inside the reward only the value matters, and k1 is the right choice. In a loss only the gradient matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from rlsdk.algorithms.named import resolve
from rlsdk.interfaces import ConfigError, KlEstimator, nearest

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated: exp(20) is 5e8, and float32 overflows at exp(88).
Beyond it the gradient of the exponential is 0 instead of infinite."""
K3_TANGENT_FROM = 5.0
"""k3 is exact for d >= -5, that is reference / policy up to 148. Below, it is the tangent at -5."""
LOW_VAR_KL_MAX = 10.0
"""Maximum value of `low_var_kl`, as in verl."""
REWARD_ESTIMATOR = "k1"
"""Default of a penalty inside the reward."""
LOSS_ESTIMATOR = "k3"
"""Default of a penalty in the loss."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Returns `[N]`: the log-ratio itself."""
    return log_probs - ref_log_probs


k1.not_as_loss = (  # type: ignore[attr-defined]
    "its expected gradient is zero (the expected score function), so it would only add noise"
)


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Returns `[N]`: half the squared log-ratio."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Returns `[N]`: `exp(-d) - 1 + d` for d >= -5, its tangent below. `expm1` keeps small differences accurate."""
    falling = ref_log_probs - log_probs
    curved = falling.clamp(max=K3_TANGENT_FROM)
    # relu instead of falling - curved: its gradient is exactly 0 on the curve, where gradients can be tiny.
    return curved.expm1() - curved + (falling - K3_TANGENT_FROM).relu() * math.expm1(K3_TANGENT_FROM)


def low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Returns `[N]`: k3, clamped to `LOW_VAR_KL_MAX`; clamped tokens have no gradient."""
    return k3(log_probs, ref_log_probs).clamp(max=LOW_VAR_KL_MAX)


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Returns `[N]`: magnitude of the log-ratio."""
    return (log_probs - ref_log_probs).abs()


KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl, "abs": absolute}
"""Built-in estimators by name."""


def kl_estimator(name: str | KlEstimator) -> KlEstimator:
    """Returns the estimator of that name: a built-in one, or `package.module:function`. Returns a function unchanged.

    Raises:
        ConfigError: there is no such estimator.
    """
    if not isinstance(name, str):
        return name
    if name in KL_ESTIMATORS:
        return KL_ESTIMATORS[name]
    if ":" in name:
        found: KlEstimator = resolve(name, "KL estimator")
        return found
    raise ConfigError(
        f"KL estimator {name!r} does not exist{nearest(name, KL_ESTIMATORS)}; choose one of {sorted(KL_ESTIMATORS)}"
    )


def loss_kl_estimator(name: str | KlEstimator) -> KlEstimator:
    """Like `kl_estimator`, for a penalty in the loss.

    Raises:
        ConfigError: there is no such estimator, or it must not be used in a loss (`not_as_loss`).
    """
    estimator = kl_estimator(name)
    reason = getattr(estimator, "not_as_loss", "")
    if reason:
        raise ConfigError(
            f"KL estimator {name!r} cannot be used in a loss: {reason}; choose 'k2' or 'k3', "
            "or subtract the KL from the reward"
        )
    return estimator
