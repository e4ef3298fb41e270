"""Metrics of the mismatch between the policy that sampled and the policy that is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rlsdk.algorithms.kl import MAX_LOG_RATIO, k3
from rlsdk.algorithms.reductions import Samples
from rlsdk.interfaces import Batch


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Mismatch of rollout and train engine over response tokens, natural logs; NaN if there are no tokens."""

    kl_k1: float = math.nan
    """KL(rollout || train), mean over tokens of log rollout - log train. Unbiased; may be negative."""
    kl_k3: float = math.nan
    """The same KL estimated by k3: low variance, never negative."""
    ess_token: float = math.nan
    """Effective sample size of the token weights train / rollout, as a share of the number of tokens: 1 if all weights
    are equal, `1 / n` if one token has all the weight."""
    ess_sequence: float = math.nan
    """The same for whole responses, whose weight is the product over their tokens."""
    perplexity_train: float = math.nan
    """exp of the mean negative log-prob of a token."""
    perplexity_rollout: float = math.nan
    ratio_max: float = math.nan
    """Largest train / rollout of a token; at most e^20."""
    ratio_min: float = math.nan

    def metrics(self) -> Mapping[str, float]:
        """Returns the numbers by name, for a log."""
        return asdict(self)


@torch.no_grad()
def mismatch(batch: Batch, train: Tensor, rollout: Tensor) -> Mismatch:
    """Compares the log-probs of two policies for the same tokens.

    Args:
        batch: with `response_mask`; samples whose reward failed also count.
        train: `[N]`, from the train engine.
        rollout: `[N]`, as returned at sampling.
    """
    mask = batch["response_mask"]
    if not mask.any():
        return Mismatch()
    ours, theirs = train[mask].double(), rollout[mask].double()
    log_ratio = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    samples = Samples.of(batch)
    of_sample = samples.token_sum(torch.where(mask, train.double() - rollout.double(), 0.0))
    sampled = samples.lengths > 0
    return Mismatch(
        kl_k1=float((theirs - ours).mean()),
        kl_k3=float(k3(theirs, ours).mean()),
        ess_token=_effective_share(log_ratio),
        ess_sequence=_effective_share(of_sample[sampled]),
        perplexity_train=float((-ours.mean()).exp()),
        perplexity_rollout=float((-theirs.mean()).exp()),
        ratio_max=float(log_ratio.max().exp()),
        ratio_min=float(log_ratio.min().exp()),
    )


def _effective_share(log_weights: Tensor) -> float:
    """Returns `(sum w)^2 / (n sum w^2)` for `w = exp(log_weights)`, without overflow."""
    both = 2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)
    return float((both - math.log(len(log_weights))).exp())
