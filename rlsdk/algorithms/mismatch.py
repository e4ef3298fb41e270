"""How far the policy that sampled is from the one that is trained, in numbers for a log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO, k3
from rlsdk.interfaces import Batch


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Rollout against train engine over response tokens, natural logs; NaN where there are no tokens."""

    kl_k1: float = math.nan
    """KL(rollout || train), mean over tokens of log rollout - log train. Unbiased; may be negative."""
    kl_k3: float = math.nan
    """The same by k3: of low variance, never negative."""
    ess_token: float = math.nan
    """Effective sample size of the weights train / rollout of tokens, as a share of their number: 1 where all are
    equal, `1 / n` where one owns all."""
    ess_sequence: float = math.nan
    """The same of whole responses, whose weight is the product over their tokens."""
    perplexity_train: float = math.nan
    """exp of the mean negative log-prob of a token."""
    perplexity_rollout: float = math.nan
    ratio_max: float = math.nan
    """Largest train / rollout of a token; at most e^20."""
    ratio_min: float = math.nan

    def metrics(self) -> Mapping[str, float]:
        """By name, for a log."""
        return asdict(self)


@torch.no_grad()
def mismatch(batch: Batch, train: Tensor, rollout: Tensor) -> Mismatch:
    """Compares log-probs of the same tokens by the two policies.

    Args:
        batch: with `response_mask`; rows whose reward failed count like others.
        train: `[N]`, by the train engine.
        rollout: `[N]`, as returned at sampling.
    """
    mask = batch["response_mask"]
    if not mask.any():
        return Mismatch()
    ours, theirs = train[mask].double(), rollout[mask].double()
    log_ratio = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_row = batch.row_sum(torch.where(mask, train.double() - rollout.double(), 0.0))
    sampled = batch.row_sum(mask.long()) > 0
    return Mismatch(
        kl_k1=float((theirs - ours).mean()),
        kl_k3=float(k3(theirs, ours).mean()),
        ess_token=_effective_share(log_ratio),
        ess_sequence=_effective_share(of_row[sampled]),
        perplexity_train=float((-ours.mean()).exp()),
        perplexity_rollout=float((-theirs.mean()).exp()),
        ratio_max=float(log_ratio.max().exp()),
        ratio_min=float(log_ratio.min().exp()),
    )


def _effective_share(log_weights: Tensor) -> float:
    """`(sum w)^2 / (n sum w^2)` of `w = exp(log_weights)`, without overflow."""
    both = 2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)
    return float((both - math.log(len(log_weights))).exp())
