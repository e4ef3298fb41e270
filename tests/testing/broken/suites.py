"""The conformance suites of all broken backends, one class each. Run by `test_broken.py`, never by itself."""

from __future__ import annotations

from broken import plugin
from rlsdk.testing import RolloutConformance, ShardingConformance, TrainConformance

_more = {"modules": (plugin,)}
_bounded = {**_more, "arguments": {"bucket_bytes": 512}, "bucket_bytes": 512}
for _suite, _names, _fields in (
    (RolloutConformance, plugin.ROLLOUT, _more),
    (TrainConformance, plugin.TRAIN, _more),
    (ShardingConformance, plugin.SHARDING, _bounded),
):
    for _name in _names:
        _class = type(f"Test_{_suite.kind.name}_{_name}", (_suite,), {"backend": _name, **_fields})
        globals()[_class.__name__] = _class
del _class, _suite, RolloutConformance, ShardingConformance, TrainConformance
