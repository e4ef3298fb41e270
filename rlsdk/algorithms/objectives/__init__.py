"""Objectives: the functions that a train engine differentiates.

They can be pickled, do not depend on the engine, and are additive over every split of the rows. Each has `outputs` (the
model outputs that it needs), `fields` (the batch fields that it reads; the engine itself also needs `input_ids`), and
`whole_groups`: True if rows of equal `uid` must stay in one mini-batch and one micro-batch, or only those of a sample
(`whole_samples`).
"""

from __future__ import annotations

from rlsdk.algorithms.objectives.kto import KtoObjective, label_weights, mean_log_ratio
from rlsdk.algorithms.objectives.policy import PolicyObjective
from rlsdk.algorithms.objectives.preference import DpoObjective, RewardModelObjective, pair_weights
from rlsdk.algorithms.objectives.process import ProcessRewardObjective, step_weights
from rlsdk.algorithms.objectives.supervised import DistillObjective, SftObjective
from rlsdk.algorithms.objectives.value import ValueObjective

__all__ = [
    "DistillObjective",
    "DpoObjective",
    "KtoObjective",
    "PolicyObjective",
    "ProcessRewardObjective",
    "RewardModelObjective",
    "SftObjective",
    "ValueObjective",
    "label_weights",
    "mean_log_ratio",
    "pair_weights",
    "step_weights",
]
