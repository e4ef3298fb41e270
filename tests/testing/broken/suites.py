"""The conformance suites of all broken backends, one class each. Run by `test_broken.py`, never by itself."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from broken import plugin
from rlsdk.testing import RolloutConformance, ShardingConformance, TrainConformance
from rlsdk.testing.models import write_tiny_model

_FOLDER = tempfile.TemporaryDirectory(prefix="rlsdk-broken-")
_MODEL = write_tiny_model(
    Path(_FOLDER.name), layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1
)
# The suites look for garbage many times, and need not look through transformers each time.
gc.collect()
gc.freeze()
_engine = {"modules": (plugin,), "model": str(_MODEL), "leak_calls": 12, "leak_steps": 15, "leak_mib": 10.0}
_bounded = {"modules": (plugin,), "arguments": {"bucket_bytes": 512}, "bucket_bytes": 512}
for _suite, _names, _fields in (
    (RolloutConformance, plugin.ROLLOUT, _engine),
    (TrainConformance, plugin.TRAIN, _engine),
    (ShardingConformance, plugin.SHARDING, _bounded),
):
    for _name in _names:
        _class = type(f"Test_{_suite.kind.name}_{_name}", (_suite,), {"backend": _name, **_fields})
        globals()[_class.__name__] = _class
del _class, _suite, RolloutConformance, ShardingConformance, TrainConformance
