"""Converts one score per sample to a reward per token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.kl import REWARD_ESTIMATOR, kl_estimator
from rlsdk.algorithms.reductions import Samples
from rlsdk.algorithms.signal import score_dtype
from rlsdk.interfaces import Batch, BatchError, KlEstimator


def token_level_rewards(
    batch: Batch,
    kl_coef: float = 0.0,
    estimator: str | KlEstimator = REWARD_ESTIMATOR,
    *,
    log_probs: Tensor | None = None,
) -> Batch:
    """Puts each sample's score on its last response token, and subtracts a KL penalty from every response token.

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2, applied per token. If the batch has `token_scores`, they are
    added on response tokens. With `chain_scores`, each chain's score is on the last one of the chain. Invalid samples
    get 0 everywhere. Without a response token the score is dropped.

    Args:
        batch: needs `scores [B]`, `response_mask`; with `kl_coef` also `ref_log_probs`.
        kl_coef: factor of the KL estimate, in units of reward per nat; 0 needs no reference.
        estimator: a name of `KL_ESTIMATORS`, or a function.
        log_probs: `[N]` log-probs of the policy, needed with `kl_coef`. The caller chooses which (the sampler's or
            recomputed ones); they must be finite on every response token of every valid row.

    Returns:
        The batch with `token_level_rewards [N]` float64, 0 outside of the mask: computed in float32 where that keeps
        the differences of scores (`score_dtype`), else in float64. `baseline_scores` are rounded in the same way.

    Raises:
        BatchError: a penalty has no log-probs, or some are not finite on a response token; the message names rows.
    """
    mask = batch["response_mask"]
    samples = Samples.scored(batch)
    tokens, place = samples.tokens, torch.arange(batch.num_tokens, device=mask.device)
    none = place.new_full((samples.count,), -1)
    last = none.scatter_reduce(0, samples.of_token[tokens], place.where(mask[tokens], -1), "amax")
    usable = samples.valid & (last >= 0)
    counted = mask & usable[samples.of_token]
    dtype = score_dtype(batch)
    rewards = batch["scores"].new_zeros(batch.num_tokens, dtype=dtype)
    rewards[tokens[last[usable]]] = samples.scores[usable].to(dtype)
    if "token_scores" in batch:
        rewards = rewards + torch.where(counted, batch["token_scores"].to(dtype), 0.0)
    if kl_coef:
        policy = _complete(log_probs, "log_probs", counted, batch)
        reference = _complete(batch["ref_log_probs"], "ref_log_probs", counted, batch)
        rewards = rewards - torch.where(counted, kl_coef * kl_estimator(estimator)(policy, reference), 0.0)
    if "baseline_scores" in batch:
        batch = batch.with_rows(baseline_scores=batch["baseline_scores"].to(dtype).double())
    return batch.with_tokens(token_level_rewards=rewards.double())


def _complete(values: Tensor | None, name: str, counted: Tensor, batch: Batch) -> Tensor:
    """Returns `values`, after checking that every counted token has a finite value."""
    if values is None:
        raise BatchError(
            "a KL penalty in the reward needs the policy's log-probs: pass log_probs= (old_log_probs recomputed for "
            "all rows, or rollout_log_probs)"
        )
    if values.shape != counted.shape:
        raise BatchError(f"{name}: expected [{len(counted)}] (N tokens), got {list(values.shape)}")
    missing = counted & ~values.isfinite()
    if missing.any():
        rows = torch.unique(batch.row_of_token[missing])
        named = batch.rows["row_id"][rows[:5]].tolist()
        raise BatchError(
            f"{name}: {int(missing.sum())} response tokens of {len(rows)} rows (row_id {named}) have no finite "
            "log-prob; a penalty needs them for all valid rows"
        )
    return values
