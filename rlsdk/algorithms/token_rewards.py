"""From one score per row to a reward per token."""

from __future__ import annotations

import torch

from rlsdk.algorithms.advantages import valid_rows
from rlsdk.algorithms.kl import kl_estimator
from rlsdk.interfaces import Batch


def token_level_rewards(batch: Batch, kl_coef: float = 0.0, estimator: str = "k1") -> Batch:
    """Puts each row's score on its last response token, less `kl_coef` times the KL estimate of every response token.

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2, token by token. Rows that are not valid get 0 everywhere; the
    score of a row without a response token has nowhere to stand and is left out.

    Args:
        batch: needs `scores [B]`, `response_mask`; with `kl_coef` also `ref_log_probs` and `old_log_probs` (or
            `rollout_log_probs`, where the former were not computed).
        kl_coef: in units of reward per nat; 0 needs no reference.
        estimator: a name of `KL_ESTIMATORS`.

    Returns:
        The batch with `token_level_rewards [N]` float32, 0 off the mask.
    """
    mask = batch["response_mask"]
    position = torch.arange(batch.num_tokens, device=mask.device)
    last = torch.full_like(batch.lengths, -1).scatter_reduce(0, batch.row_of_token, position.where(mask, -1), "amax")
    usable = valid_rows(batch) & (last >= 0)
    rewards = batch["scores"].new_zeros(batch.num_tokens, dtype=torch.float32)
    rewards[last[usable]] = batch["scores"][usable]
    if kl_coef:
        policy = batch["old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"]
        penalty = kl_coef * kl_estimator(estimator)(policy, batch["ref_log_probs"])
        rewards = rewards - torch.where(mask & usable[batch.row_of_token], penalty, 0.0)
    return batch.with_tokens(token_level_rewards=rewards)
