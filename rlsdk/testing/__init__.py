"""Conformance suites, tiny models, and engines that hold plain tensors, for authors of engines.

    from rlsdk.testing import RolloutConformance

    class TestMine(RolloutConformance):
        backend = "mine"

Importing this package loads only the standard library; accessing a suite loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.testing.rollout_suite import RolloutConformance
    from rlsdk.testing.sharding_suite import ShardingConformance
    from rlsdk.testing.suites.requirements import Measured, requirement
    from rlsdk.testing.train_suite import TrainConformance

__all__ = ["Measured", "RolloutConformance", "ShardingConformance", "TrainConformance", "requirement"]

_HOMES = {
    "Measured": "rlsdk.testing.suites.requirements",
    "requirement": "rlsdk.testing.suites.requirements",
    "RolloutConformance": "rlsdk.testing.rollout_suite",
    "ShardingConformance": "rlsdk.testing.sharding_suite",
    "TrainConformance": "rlsdk.testing.train_suite",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
