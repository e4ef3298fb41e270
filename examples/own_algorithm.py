"""An algorithm of your own, in a file: an advantage estimator, a policy loss and a callback, each a plain function.

    rlsdk train --model m1 --data sums.jsonl --reward gsm8k --trainer.steps 2 \
        --algorithm.advantage own_algorithm.py:best_of_group \
        --algorithm.loss own_algorithm.py:reinforce --algorithm.loss_options '{limit: 4.0}' \
        --trainer.callbacks '[own_algorithm.py:warn_when_short]'
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms import scores_differ
from rlsdk.interfaces import Batch, PolicyLossInputs


def best_of_group(batch: Batch) -> Batch:
    """1 for a prompt's best samples, 0 for the others; 0 for all of them where all scores are equal. Samples whose
    reward failed are no competitors: they neither win nor make the others winners."""
    valid, (uids, group) = batch["valid"], torch.unique(batch["uid"], return_inverse=True)

    def extreme(how: str, start: float) -> Tensor:
        scores = torch.where(valid, batch["scores"], start)
        return scores.new_full((len(uids),), start).scatter_reduce(0, group, scores, how)[group]

    best, worst = extreme("amax", -torch.inf), extreme("amin", torch.inf)
    # Sums of rewards are equal up to rounding: 0.1 + 0.2 is not 0.3.
    wins = (valid & ~scores_differ(best, batch["scores"]) & scores_differ(best, worst)).float()
    return batch.with_tokens(advantages=wins[batch.row_of_token] * batch["response_mask"])


def reinforce(inputs: PolicyLossInputs, *, limit: float = 2.0) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`-A log p` of each token (Williams 1992), weighed with its ratio to the sampling policy, cut at `limit` (as in
    IMPALA, Espeholt et al. 2018)."""
    ratio = torch.where(inputs.mask, inputs.log_probs.detach() - inputs.old_log_probs, 0.0).exp().clamp(max=limit)
    return -inputs.advantages * ratio * inputs.log_probs, {"ratio": ratio}


# Tokens without an advantage have no gradient: rows of such tokens only may be left out of updates.
reinforce.zero_without_advantage = True  # type: ignore[attr-defined]


def warn_when_short(step: int, metrics: Mapping[str, float]) -> None:
    """Says when responses have shrunk to almost nothing. What a callback raises ends the run after a save."""
    if metrics["response/tokens_mean"] < 2:
        print(f"step {step}: responses of {metrics['response/tokens_mean']:.1f} tokens", file=sys.stderr)
