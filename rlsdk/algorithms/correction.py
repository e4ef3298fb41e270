"""Correction for samples that another policy made than the one whose log-probs the update takes as old.

The rollout engine differs from the train engine by rounding and kernels, and in an asynchronous run by versions. With
`rollout_log_probs` (behaviour policy: what sampled) and `old_log_probs` (proximal policy: the train engine, recomputed
before the update), the policy loss of a token is multiplied with a weight that has no gradient: old / rollout, bounded.
With a PPO loss on top, whose ratio is current / old, this is the decoupled objective of three policies (Hilton et al.
2021, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298).

Two independent parts: `correct_rollout` weighs tokens, `reject_rows` leaves rows out altogether.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO
from rlsdk.algorithms.reductions import row_mean
from rlsdk.interfaces import Batch, ConfigError, nearest

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


def engine_log_ratio(batch: Batch, level: str) -> Tensor:
    """`[N]` float32: log of old / rollout, cut at +-20; 0 off the mask.

    Args:
        batch: with `old_log_probs`, `rollout_log_probs`, `response_mask`.
        level: `token`: of each token; `sequence`: summed over the response, the exact weight of a response, whose
            variance grows with its length; `geometric`: mean over the response's tokens, biased and comparable between
            lengths.

    Raises:
        ConfigError: an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"correction level {level!r}{nearest(level, LEVELS)}; choose one of {list(LEVELS)}")
    mask = batch["response_mask"]
    ratio = torch.where(mask, batch["old_log_probs"] - batch["rollout_log_probs"], 0.0)
    if level == "sequence":
        ratio = batch.row_sum(ratio)[batch.row_of_token]
    elif level == "geometric":
        ratio = row_mean(ratio, mask, batch)[batch.row_of_token]
    return torch.where(mask, ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0).float()


@torch.no_grad()
def correct_rollout(
    batch: Batch, *, level: str = "token", mode: str = "truncate", upper: float = 2.0, lower: float = 0.0
) -> Batch:
    """Adds `rollout_weight [N]` float32: importance weight of each response token, 0 off the mask.

    - `truncate`: `min(max(ratio, lower), upper)`: truncated importance sampling (IMPALA, Espeholt et al. 2018, arXiv
      1802.01561; for engine mismatch Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
      training"). Every token keeps a gradient.
    - `mask`: the ratio where it is within the bounds, 0 elsewhere: masked importance sampling (IcePop; Liu et al. 2025,
      "When speed kills stability"). Tokens, or with `level` sequence whole responses, outside teach nothing.

    The divisor of the loss stays that of all tokens: nothing is renormalised.

    Args:
        batch: with `old_log_probs`, complete, and `rollout_log_probs`.
        level: see `engine_log_ratio`.
        mode: one of the two above.
        upper: largest ratio, above `lower`.
        lower: smallest ratio, at least 0.

    Raises:
        ConfigError: an unknown name, or bounds that do not fit.
    """
    if mode not in MODES:
        raise ConfigError(f"correction mode {mode!r}{nearest(mode, MODES)}; choose one of {list(MODES)}")
    _check_bounds(lower, upper)
    ratio = engine_log_ratio(batch, level).exp()
    weight = ratio.clamp(lower, upper) if mode == "truncate" else ratio * ((ratio >= lower) & (ratio <= upper))
    return batch.with_tokens(rollout_weight=torch.where(batch["response_mask"], weight, 0.0))


@torch.no_grad()
def reject_rows(batch: Batch, *, level: str = "geometric", upper: float = 1.001, lower: float = 0.999) -> Batch:
    """Takes rows out of the loss whose ratio old / rollout is outside the bounds: `trained` is False on them, so no
    aggregation counts them; their score still counts for their group.

    Sequence rejection (Liu et al. 2025, "When speed kills stability"; in verl `rollout_rs`). With `level` token a row
    is rejected when any of its tokens is outside ("veto").

    Args:
        batch: with `old_log_probs`, complete, and `rollout_log_probs`.
        level: see `engine_log_ratio`.
        upper: largest ratio, above `lower`. The defaults are for `geometric`; for `token` think of 1e4 and 1e-4, for
            `sequence` of 2.0 and 0.5.
        lower: smallest ratio, at least 0.

    Raises:
        ConfigError: an unknown level, or bounds that do not fit.
    """
    _check_bounds(lower, upper)
    ratio = engine_log_ratio(batch, level).exp()
    outside = batch["response_mask"] & ((ratio < lower) | (ratio > upper))
    kept = batch.row_sum(outside.long()) == 0
    return batch.with_rows(trained=kept & batch["trained"] if "trained" in batch else kept)


def _check_bounds(lower: float, upper: float) -> None:
    if not 0 <= lower < upper:
        raise ConfigError(f"correction bounds are lower {lower!r}, upper {upper!r}: expected 0 <= lower < upper")
