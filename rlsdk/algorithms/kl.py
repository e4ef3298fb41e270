"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens.

Schulman, "Approximating KL divergence" (2020). With d = log policy - log reference, tokens sampled from the policy:

| name | value | as a number | as a loss (differentiated) |
|---|---|---|---|
| k1 | d | unbiased, high variance, may be negative | expected gradient is zero: never use it as a loss |
| k2 | d^2 / 2 | biased, low variance | expected gradient is that of KL(policy, reference): the right one |
| k3 | exp(-d) - 1 + d | unbiased, low variance, never negative | gradient of KL(reference, policy); GRPO's choice |
| abs | abs(d) | a distance, not a KL | bounded gradient |

As a penalty inside the reward only the number counts, and k1 is the exact choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rlsdk.interfaces import ConfigError, nearest

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before they are exponentiated: exp(20) is 5e8, and float32 overflows at 88. Beyond it the
gradient of the exponential is 0 instead of infinite."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`[N]`: the log-ratio itself."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`[N]`: half the squared log-ratio."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`[N]`: `exp(-d) - 1 + d`, by `expm1`, so small differences keep their digits."""
    difference = log_probs - ref_log_probs
    return (-difference).clamp(max=MAX_LOG_RATIO).expm1() + difference


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`[N]`: magnitude of the log-ratio."""
    return (log_probs - ref_log_probs).abs()


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def kl_estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator of that name: a function of (log_probs, ref_log_probs).

    Raises:
        ConfigError: no such estimator.
    """
    if name not in KL_ESTIMATORS:
        raise ConfigError(
            f"KL estimator {name!r} does not exist{nearest(name, KL_ESTIMATORS)}; choose one of {sorted(KL_ESTIMATORS)}"
        )
    return KL_ESTIMATORS[name]
