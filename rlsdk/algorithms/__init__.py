"""Pure tensor functions on the packed batch: rewards, advantages, losses, KL, weights, corrections, objectives,
metrics.

They use no engine, process or file. The order in a step: `old_log_probs` as `rlsdk.config.choose_old_log_probs`
decides, `correct_rollout`, length penalties on `scores`, `token_level_rewards`, an advantage estimator, `loss_weights`
per mini-batch, an objective that the train engine differentiates, and `update_means` for the log. docs/algorithms.md
lists every name with its formula.
"""

from __future__ import annotations

from rlsdk.algorithms.advantages import (
    dr_grpo,
    gae,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from rlsdk.algorithms.correction import correct_rollout, reject_rows
from rlsdk.algorithms.ema import update_average
from rlsdk.algorithms.kl import KL_ESTIMATORS, kl_estimator, loss_kl_estimator
from rlsdk.algorithms.kl_control import KlController
from rlsdk.algorithms.lengths import length_penalty, overlong_filter, overlong_punishment, relative_length_reward
from rlsdk.algorithms.losses import cispo, gspo, policy_gradient, ppo_clip, sapo
from rlsdk.algorithms.metrics import LogProbDifference, log_prob_difference, update_means
from rlsdk.algorithms.mismatch import Mismatch, mismatch
from rlsdk.algorithms.objectives import (
    DistillObjective,
    DpoObjective,
    KtoObjective,
    PolicyObjective,
    ProcessRewardObjective,
    RewardModelObjective,
    SftObjective,
    ValueObjective,
    label_weights,
    mean_log_ratio,
    pair_weights,
    step_weights,
)
from rlsdk.algorithms.objectives.value import explained_variance
from rlsdk.algorithms.reductions import Samples
from rlsdk.algorithms.signal import (
    GroupSignal,
    group_signal,
    has_signal,
    is_verdict,
    reaches,
    score_dtype,
    scores_differ,
)
from rlsdk.algorithms.step_scores import REDUCTIONS, reduce_steps, step_scores
from rlsdk.algorithms.token_rewards import token_level_rewards
from rlsdk.algorithms.versions import count_stale
from rlsdk.algorithms.weights import AGGREGATIONS, Aggregation, keep_top_entropy, loss_weights

__all__ = [
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "REDUCTIONS",
    "Aggregation",
    "DistillObjective",
    "DpoObjective",
    "GroupSignal",
    "KlController",
    "KtoObjective",
    "LogProbDifference",
    "Mismatch",
    "PolicyObjective",
    "ProcessRewardObjective",
    "RewardModelObjective",
    "Samples",
    "SftObjective",
    "ValueObjective",
    "cispo",
    "correct_rollout",
    "count_stale",
    "dr_grpo",
    "explained_variance",
    "gae",
    "gpg",
    "group_signal",
    "grpo",
    "grpo_passk",
    "gspo",
    "has_signal",
    "is_verdict",
    "keep_top_entropy",
    "kl_estimator",
    "label_weights",
    "length_penalty",
    "log_prob_difference",
    "loss_kl_estimator",
    "loss_weights",
    "mean_log_ratio",
    "mismatch",
    "opo",
    "overlong_filter",
    "overlong_punishment",
    "pair_weights",
    "policy_gradient",
    "ppo_clip",
    "reaches",
    "reduce_steps",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reject_rows",
    "relative_length_reward",
    "remax",
    "rloo",
    "sapo",
    "score_dtype",
    "scores_differ",
    "step_scores",
    "step_weights",
    "token_level_rewards",
    "update_average",
    "update_means",
]
