"""Objectives: what a train engine differentiates. Picklable, engine-blind, and additive over any cut of the rows.

Each has `outputs` (what it needs of the model), `fields` (what it reads of the batch; the engine itself needs
`input_ids` besides), and `whole_groups`: True where rows of equal `uid` must stay in one mini-batch and one
micro-batch.
"""

from __future__ import annotations

from rlsdk.algorithms.objectives.policy import PolicyObjective
from rlsdk.algorithms.objectives.preference import DpoObjective, RewardModelObjective, pair_weights
from rlsdk.algorithms.objectives.supervised import SftObjective
from rlsdk.algorithms.objectives.value import ValueObjective

__all__ = [
    "DpoObjective",
    "PolicyObjective",
    "RewardModelObjective",
    "SftObjective",
    "ValueObjective",
    "pair_weights",
]
