"""The conformance suites of all broken backends, one class each. Run by `test_broken.py`, never by itself."""

from __future__ import annotations

from broken import plugin
from rlsdk.testing import RolloutConformance, TrainConformance

for _suite, _names in ((RolloutConformance, plugin.ROLLOUT), (TrainConformance, plugin.TRAIN)):
    for _name in _names:
        _class = type(f"Test_{_suite.kind}_{_name}", (_suite,), {"backend": _name, "modules": (plugin,)})
        globals()[_class.__name__] = _class
del _class, _suite, RolloutConformance, TrainConformance
