"""The Python API: what a script or a notebook calls, and what the command line is a thin layer over.

Everything here is also in `rlsdk` itself: `rlsdk.train`, `rlsdk.Run`.
"""

from __future__ import annotations

from rlsdk.api.chart import Chart
from rlsdk.api.inference import evaluate, generate
from rlsdk.api.machine import doctor, plan, plugins
from rlsdk.api.run import Run
from rlsdk.api.small_model import make_model
from rlsdk.api.table import Table
from rlsdk.api.training import dpo, reward_model, sft, train
from rlsdk.interfaces import RewardSample, RlsdkError
from rlsdk.trainer.events import RunView as Quiet

__all__ = ["Chart", "Quiet", "RewardSample", "RlsdkError", "Run", "Table", "doctor", "dpo", "evaluate", "generate",
           "make_model", "plan", "plugins", "reward_model", "sft", "train"]  # fmt: skip
