"""Pure tensor functions on the packed batch: advantages, losses, KL estimators, weights, objectives, metrics.

No engine, no process, no file. A run goes: `token_level_rewards`, an advantage estimator, `loss_weights` per
mini-batch, and a `PolicyObjective` that the train engine differentiates.
"""

from __future__ import annotations

from rlsdk.algorithms.advantages import grpo, rloo
from rlsdk.algorithms.kl import KL_ESTIMATORS
from rlsdk.algorithms.losses import ppo_clip
from rlsdk.algorithms.metrics import LogProbDifference, log_prob_difference
from rlsdk.algorithms.objective import PolicyObjective, SftObjective
from rlsdk.algorithms.token_rewards import token_level_rewards
from rlsdk.algorithms.weights import Aggregation, loss_weights

__all__ = [
    "KL_ESTIMATORS",
    "Aggregation",
    "LogProbDifference",
    "PolicyObjective",
    "SftObjective",
    "grpo",
    "log_prob_difference",
    "loss_weights",
    "ppo_clip",
    "rloo",
    "token_level_rewards",
]
