"""The conformance suites of broken backends, one class each, with the requirements that each must fail. Run by
`broken_runs.py`, never by itself, with their names in `RLSDK_BROKEN_NAMES`. With `RLSDK_BROKEN=all` in the environment
every requirement runs."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from broken import plugin
from rlsdk.testing import RolloutConformance, ShardingConformance, TrainConformance
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.suites.requirements import MARK

_FOLDER = tempfile.TemporaryDirectory(prefix="rlsdk-broken-")
_SHAPE = {"layers": 1, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
_MODEL = write_tiny_model(Path(_FOLDER.name) / "trained", hidden_size=64, **_SHAPE)
_SURE = write_tiny_model(Path(_FOLDER.name) / "served", sharpness=2.0, **_SHAPE)
# The suites look for garbage many times, and need not look through transformers each time.
gc.collect()
gc.freeze()
_ALL = os.environ.get("RLSDK_BROKEN") == "all"
_NAMES = frozenset(os.environ["RLSDK_BROKEN_NAMES"].split(","))


def _left_out(suite: type[Any], named: Collection[str]) -> dict[str, None]:
    """Tests of a suite that are no requirement of these names."""
    found: dict[str, None] = {}
    for test in dir(suite):
        marks = [mark for mark in getattr(getattr(suite, test), "pytestmark", ()) if mark.name == MARK]
        # A requirement with parameters has several names that begin alike.
        if marks and not any(name.partition("[")[0] == marks[0].args[0] for name in named):
            found[test] = None
    return found


_engine = {"modules": (plugin,), "model": str(_MODEL), "leak_calls": 12, "leak_steps": 15, "leak_mib": 10.0}
_rollout = {**_engine, "model": str(_SURE), "max_running": 32, "timeout_s": 20.0}
_bounded = {"modules": (plugin,), "arguments": {"bucket_bytes": 2048}, "bucket_bytes": 2048}
for _suite, _names, _fields in (
    (RolloutConformance, plugin.ROLLOUT, _rollout),
    (TrainConformance, plugin.TRAIN, _engine),
    (ShardingConformance, plugin.SHARDING, _bounded),
):
    for _name, _defect in ((name, defect) for name, defect in _names.items() if name in _NAMES):
        _others = {} if _ALL else _left_out(_suite, _defect.fails)
        _class = type(f"Test_{_suite.kind.name}_{_name}", (_suite,), {"backend": _name, **_fields, **_others})
        globals()[_class.__name__] = _class
del _suite, RolloutConformance, ShardingConformance, TrainConformance
