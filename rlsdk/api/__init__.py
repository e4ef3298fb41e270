"""The Python API: what a script or a notebook calls, and what the command line is a thin layer over.

Everything here is also in `rlsdk` itself: `rlsdk.train`, `rlsdk.Run`.
"""

from __future__ import annotations

from rlsdk.api.chart import Chart
from rlsdk.api.inference import evaluate, generate
from rlsdk.api.machine import doctor, plan, plugins
from rlsdk.api.run import Run
from rlsdk.api.table import Table
from rlsdk.api.training import dpo, reward_model, sft, train

__all__ = ["Chart", "Run", "Table", "doctor", "dpo", "evaluate", "generate", "plan", "plugins", "reward_model", "sft",
           "train"]  # fmt: skip
