"""REINFORCE++: advantages normalised over the tokens of the whole step instead of within a prompt's group."""

from __future__ import annotations

import torch

from rlsdk.algorithms.advantages.group import dr_grpo
from rlsdk.algorithms.advantages.temporal import discounted_returns
from rlsdk.algorithms.reductions import Samples, standardize, valid_rows
from rlsdk.interfaces import Batch, reads


@reads("valid")
def reinforce_plus_plus(batch: Batch, *, gamma: float = 1.0) -> Batch:
    """Normalises discounted returns to mean 0 and variance 1 over the step's response tokens.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), designed for a KL penalty by k1 inside the reward. Needs no groups.
    (verl's version restarts the return at every gap of the mask; this one does not.)

    Args:
        batch: a whole step.
        gamma: discount per response token, in [0, 1].

    Returns:
        The batch with `advantages` and `returns` (before normalisation).

    Raises:
        ConfigError: `gamma` is outside [0, 1].
    """
    returns = discounted_returns(batch, gamma)
    counted = batch["response_mask"] & valid_rows(batch)[batch.row_of_token]
    return batch.with_tokens(advantages=standardize(returns, counted).float(), returns=returns.float())


@reads("uid", "valid")
def reinforce_plus_plus_baseline(batch: Batch) -> Batch:
    """Normalises `r - mean(group)` on response tokens to mean 0 and variance 1 over the step's response tokens.

    REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262): like GRPO, with the deviation of the step instead of the
    group's. The only valid sample of a group gets 0 and is not counted. All samples of a group with equal rewards get
    the same small number, which is not 0, because the mean is over tokens and not over samples.

    Args:
        batch: a whole step with complete groups.

    Returns:
        The batch with `advantages`.
    """
    samples = Samples.scored(batch)
    groups, valid = samples.groups, samples.valid
    comparable = valid & (groups.sum(valid.long())[groups.index] > 1)
    counted = batch["response_mask"] & comparable[samples.of_token]
    centred = dr_grpo(batch)["advantages"]
    return batch.with_tokens(advantages=torch.where(counted, standardize(centred, counted), 0.0))
