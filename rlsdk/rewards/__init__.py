"""Scores out: graders, and the runner that keeps what they do wrong away from the run."""

from __future__ import annotations

from rlsdk.rewards.answer import final_answer, parse_number
from rlsdk.rewards.definitions import FailureExample, FailureKind, RewardDef, RewardLimits, RewardResult
from rlsdk.rewards.load import load_function, prepared_by, target_of
from rlsdk.rewards.runner import RewardRunner

__all__ = [
    "FailureExample",
    "FailureKind",
    "RewardDef",
    "RewardLimits",
    "RewardResult",
    "RewardRunner",
    "final_answer",
    "load_function",
    "parse_number",
    "prepared_by",
    "target_of",
]
