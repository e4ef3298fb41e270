"""Off-policy correction, for samples from another policy than the one of `old_log_probs`.

The rollout engine differs from the train engine in rounding and kernels, and in an asynchronous run also in weights.
`rollout_log_probs` are those of the behaviour policy (the one that sampled); `old_log_probs` are those of the proximal
policy (recomputed by the train engine before the update). The policy loss of each token is multiplied by the bounded
ratio old / rollout, without gradient. With a PPO loss, whose ratio is current / old, this is the decoupled objective
with three policies (Hilton et al. 2021, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298).

The two parts are independent: `correct_rollout` weights tokens, `reject_rows` removes samples from the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO
from rlsdk.algorithms.reductions import Samples
from rlsdk.interfaces import Batch, ConfigError, nearest

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


def engine_log_ratio(batch: Batch, level: str) -> Tensor:
    """Returns `[N]` float32: log of old / rollout, clamped to +-20; 0 outside of the mask.

    Args:
        batch: with `old_log_probs`, `rollout_log_probs`, `response_mask`.
        level: `token`: the ratio of each token. `sequence`: the sum over the response, the exact importance weight,
            whose variance grows with the length. `geometric`: the mean over the response's tokens, which is biased but
            comparable between lengths.

    Raises:
        ConfigError: the level is unknown.
    """
    if level not in LEVELS:
        raise ConfigError(f"correction level {level!r}{nearest(level, LEVELS)}; choose one of {list(LEVELS)}")
    mask = batch["response_mask"]
    ratio = torch.where(mask, batch["old_log_probs"] - batch["rollout_log_probs"], 0.0)
    if level != "token":
        samples = Samples.of(batch)
        of_sample = samples.token_sum(ratio) if level == "sequence" else samples.token_mean(ratio, mask)
        ratio = of_sample[samples.of_token]
    return torch.where(mask, ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0).float()


@torch.no_grad()
def correct_rollout(
    batch: Batch, *, level: str = "token", mode: str = "truncate", upper: float = 2.0, lower: float = 0.0
) -> Batch:
    """Adds `rollout_weight [N]` float32: the importance weight of each response token, 0 outside of the mask.

    - `truncate`: `min(max(ratio, lower), upper)`: truncated importance sampling (IMPALA, Espeholt et al. 2018, arXiv
      1802.01561; for engine mismatch Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
      training"). Every token keeps a gradient.
    - `mask`: the ratio if it is within the bounds, else 0: masked importance sampling (IcePop; Liu et al. 2025, "When
      speed kills stability"). Tokens outside of the bounds (whole responses with `level` sequence) have no gradient.

    The loss is still divided by the number of all tokens; the weights are not renormalised.

    Args:
        batch: with `old_log_probs` for all rows, and `rollout_log_probs`.
        level: see `engine_log_ratio`.
        mode: `truncate` or `mask`.
        upper: maximum ratio, above `lower`.
        lower: minimum ratio, at least 0.

    Raises:
        ConfigError: a name is unknown, or the bounds are invalid.
    """
    if mode not in MODES:
        raise ConfigError(f"correction mode {mode!r}{nearest(mode, MODES)}; choose one of {list(MODES)}")
    _check_bounds(lower, upper)
    ratio = engine_log_ratio(batch, level).exp()
    weight = ratio.clamp(lower, upper) if mode == "truncate" else ratio * ((ratio >= lower) & (ratio <= upper))
    return batch.with_tokens(rollout_weight=torch.where(batch["response_mask"], weight, 0.0))


@torch.no_grad()
def reject_rows(batch: Batch, *, level: str = "geometric", upper: float = 1.001, lower: float = 0.999) -> Batch:
    """Removes samples from the loss whose ratio old / rollout is outside the bounds, with all their rows.

    It sets `trained` to False on them, so no aggregation counts them; their score still counts for their group.
    Sequence rejection (Liu et al. 2025, "When speed kills stability"; in verl `rollout_rs`). With `level` token, one
    token outside the bounds rejects its sample ("veto").

    Args:
        batch: with `old_log_probs` for all rows, and `rollout_log_probs`.
        level: see `engine_log_ratio`.
        upper: maximum ratio, above `lower`. The defaults suit `geometric`; for `token` use values such as 1e4 and 1e-4,
            for `sequence` 2.0 and 0.5.
        lower: minimum ratio, at least 0.

    Raises:
        ConfigError: the level is unknown, or the bounds are invalid.
    """
    _check_bounds(lower, upper)
    ratio = engine_log_ratio(batch, level).exp()
    outside = batch["response_mask"] & ((ratio < lower) | (ratio > upper))
    samples = Samples.of(batch)
    kept = (samples.token_sum(outside.long()) == 0)[samples.index]
    return batch.with_rows(trained=kept & batch["trained"] if "trained" in batch else kept)


def _check_bounds(lower: float, upper: float) -> None:
    if not 0 <= lower < upper:
        raise ConfigError(f"correction bounds are lower {lower!r}, upper {upper!r}: expected 0 <= lower < upper")
