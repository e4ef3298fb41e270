"""Advantage estimators: how much better a response was than expected.

Each reads `token_level_rewards` and `response_mask` (and `valid`, if the batch has it) of a whole step. It adds
`advantages`, flat `[N]` float32, 0 outside of the mask and on invalid samples. `@reads` declares further fields that an
estimator reads. A group is the samples of equal `uid`, each of one row or several (`sample`).
"""

from __future__ import annotations

from rlsdk.algorithms.advantages.group import dr_grpo, gpg, grpo, grpo_passk, opo, rloo
from rlsdk.algorithms.advantages.normalized import reinforce_plus_plus, reinforce_plus_plus_baseline
from rlsdk.algorithms.advantages.temporal import gae, reinforce, remax

__all__ = [
    "dr_grpo",
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
]
