"""Rewards: graders, and the runner that isolates the run from their failures."""

from __future__ import annotations

from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.functions.load import checks_rows, load_function, prepared_by, target_of
from rlsdk.rewards.functions.text_evaluation import evaluates_text
from rlsdk.rewards.grading.runner import RewardRunner
from rlsdk.rewards.scores.definitions import OWN_METRICS, FailureKind, RewardDef
from rlsdk.rewards.scores.results import FailureExample, RewardResult, failures_of, merge, name_inapplicable
from rlsdk.rewards.scores.routing import applies_to, check_routes
from rlsdk.rewards.scores.scoring import CombinedScorer, Scorer
from rlsdk.rewards.text.answer import final_answer, parse_number

__all__ = [
    "OWN_METRICS",
    "CombinedScorer",
    "FailureExample",
    "FailureKind",
    "RewardDef",
    "RewardLimits",
    "RewardResult",
    "RewardRunner",
    "Scorer",
    "applies_to",
    "check_routes",
    "checks_rows",
    "evaluates_text",
    "failures_of",
    "final_answer",
    "load_function",
    "merge",
    "name_inapplicable",
    "parse_number",
    "prepared_by",
    "target_of",
]
