"""The Python API for scripts and notebooks; the command line is a thin layer over it.

Everything here is also in `rlsdk` itself: `rlsdk.train`, `rlsdk.Run`. Modules are imported on first use, because
commands and plugins import these packages too and must start fast.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.api.chart import Chart
    from rlsdk.api.inference import evaluate, generate
    from rlsdk.api.installed import plugins
    from rlsdk.api.machine import doctor, plan
    from rlsdk.api.run import Run
    from rlsdk.api.small_model import make_model
    from rlsdk.api.table import Table
    from rlsdk.api.training import distill, dpo, kto, process_reward, reward_model, sft, train
    from rlsdk.interfaces import RewardSample, RlsdkError
    from rlsdk.trainer.tracking.events import RunView as Quiet

__all__ = ["Chart", "Quiet", "RewardSample", "RlsdkError", "Run", "Table", "distill", "doctor", "dpo", "evaluate",
           "generate", "kto", "make_model", "plan", "plugins", "process_reward", "reward_model", "sft",
           "train"]  # fmt: skip

PLACES = {
    "Chart": "rlsdk.api.chart",
    "Quiet": "rlsdk.trainer.tracking.events",
    "RewardSample": "rlsdk.interfaces",
    "RlsdkError": "rlsdk.interfaces",
    "Run": "rlsdk.api.run",
    "Table": "rlsdk.api.table",
    "distill": "rlsdk.api.training",
    "doctor": "rlsdk.api.machine",
    "dpo": "rlsdk.api.training",
    "evaluate": "rlsdk.api.inference",
    "generate": "rlsdk.api.inference",
    "kto": "rlsdk.api.training",
    "make_model": "rlsdk.api.small_model",
    "plan": "rlsdk.api.machine",
    "plugins": "rlsdk.api.installed",
    "process_reward": "rlsdk.api.training",
    "reward_model": "rlsdk.api.training",
    "sft": "rlsdk.api.training",
    "train": "rlsdk.api.training",
}
"""Name -> module that defines it."""
OTHER_NAMES = {"Quiet": "RunView"}
"""Name -> its name in that module, if different."""

# In a notebook, libraries ask for ipywidgets; rlsdk draws its progress without.
warnings.filterwarnings("ignore", message="IProgress not found")
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), OTHER_NAMES.get(name, name))
