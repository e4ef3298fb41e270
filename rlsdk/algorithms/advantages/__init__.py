"""Advantage estimators: how much better a response was than expected.

Each reads `token_level_rewards` and `response_mask` (and `valid`, if the batch has it) of a whole step. It adds
`advantages`, flat `[N]` float32, 0 outside of the mask and on invalid rows. `@reads` declares further fields that an
estimator reads. A group is the rows of equal `uid`.
"""

from __future__ import annotations

from rlsdk.algorithms.advantages.group import dr_grpo, gpg, grpo, grpo_passk, opo, rloo
from rlsdk.algorithms.advantages.normalized import reinforce_plus_plus, reinforce_plus_plus_baseline
from rlsdk.algorithms.advantages.temporal import gae, reinforce, remax
from rlsdk.algorithms.reductions import outcome_rewards, valid_rows

__all__ = [
    "dr_grpo",
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "outcome_rewards",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "valid_rows",
]
